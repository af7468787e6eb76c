"""What staging says: where training will read from, and why."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """Settings of ``stage_to_nvme``. Null ``scratch`` reads from where the rows are."""

    scratch: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingRecord:
    """``key`` names the content; ``target`` is null where no copy is made, and ``reason`` why."""

    expert: str
    key: str
    source: str
    source_sha256: str
    target: str | None
    n_bytes: int
    n_bytes_copied: int | None
    reason: str
    copy_bytes_per_s: float | None
