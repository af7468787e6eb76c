"""Have sidecars stand in for metadata that Snakemake has lost, as in a power cut or a copy.

Snakemake takes an output without metadata for up to date while no input is newer, whatever changed.
The sidecar of a record tells settings, code and flags that it was made with.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from snakemake.persistence import ParamsChange  # type: ignore[import-untyped]

from expertflow.config.code_digest import rule_digest
from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file, sha256_json, sha256_text, sidecar_of
from expertflow.core.records import read_record
from expertflow.core.sidecars import Sidecar, was_there_before


def use_sidecars(persistence: Any, stage_of: Callable[[Any], str | None]) -> None:
    """Make Snakemake ask the sidecar of a job's record where it has no readable metadata of it."""
    read_metadata, has_metadata = persistence._read_record, persistence.has_metadata
    params_changed, input_checksums = persistence.params_changed, persistence.input_checksums

    def read(key: str) -> Any:
        # Snakemake itself copes with JSON that is cut short, and with nothing else.
        with suppress(ValueError):
            return read_metadata(key)
        return None

    @cache
    def sidecar(job: Any) -> Sidecar | None:
        record = job.output.get("record")
        if record is None or stage_of(job) is None or has_metadata(job):
            return None
        with suppress(DataError):
            return read_record(Sidecar, sidecar_of(Path(record)))
        return None

    def changed(job: Any, file: Any = None) -> Any:
        made = sidecar(job)
        if made is None:
            return params_changed(job, file=file)
        old, new = _made_with(made), _made_now(job, str(stage_of(job)), made)
        return ParamsChange(only_old=old - new, only_new=new - old, files={made.output})

    def checksums(job: Any, path: Any) -> set[Any]:
        made = sidecar(job)
        if made is not None and was_there_before(Path(path), made):
            return {f"sha256:{sha256_file(Path(path))}"}
        return set(input_checksums(job, path))

    persistence._read_record = read
    persistence.has_metadata = lambda job: has_metadata(job) or sidecar(job) is not None
    persistence.params_changed, persistence.input_checksums = changed, checksums


def _made_with(made: Sidecar) -> set[str]:
    flags = {f"flags {made.flags_sha256}"} if made.flags_sha256 else set()
    return {f"settings {made.spec_sha256}", f"code {made.code}", *flags}


def _made_now(job: Any, stage: str, made: Sidecar) -> set[str]:
    spec, flags = job.params.get("spec", "{}"), job.params.get("flags")
    has_flags = made.flags_sha256 and flags is not None
    told = {f"flags {sha256_json([*flags])}"} if has_flags else set()
    return {f"settings {sha256_text(spec)}", f"code {rule_digest(stage)}", *told}
