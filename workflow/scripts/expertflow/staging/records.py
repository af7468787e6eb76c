"""Settings and record of staging: where training reads from, and why."""

from typing import Literal

from expertflow.core.records import Record

AUTO = "auto"
NO_SCRATCH = "scratch is null"
NOT_NEEDED = "not measured: it has no effect here"
Kind = Literal["rows", "weights"]


class StageSpec(Record, frozen=True, kw_only=True):
    """``scratch`` is a directory to copy to, ``auto`` to find one, null to read in place."""

    scratch: str | None = AUTO
    weights: bool = True


class Staged(Record, frozen=True, kw_only=True):
    """Where rows or weights are read from, and why.

    ``key`` identifies the content. ``target`` is null if read in place; ``is_fallback`` if a copy
    was intended but failed. A null speed was not measured, for the reason in its ``…_method``.
    ``n_bytes_copied`` is 0 for an existing copy.
    """

    kind: Kind
    key: str
    source: str
    action: Literal["read_in_place", "pre_read", "copied", "reused"] = "read_in_place"
    reason: str
    is_fallback: bool = False
    target: str | None = None
    n_files: int
    n_bytes: int
    n_bytes_copied: int | None = None
    copy_bytes_per_s: float | None = None
    source_file_system: str | None = None
    source_read_bytes_per_s: float | None = None
    source_read_method: str = NOT_NEEDED
    target_read_bytes_per_s: float | None = None
    target_read_method: str = NOT_NEEDED


class StagingRecord(Record, frozen=True, kw_only=True):
    """What ``stage_to_nvme`` found and did; training repeats it where it runs."""

    expert: str
    spec: StageSpec
    rows: Staged
    weights: Staged
