"""Recover from power cuts: remove corrupt records, and do without metadata that Snakemake lost.

Snakemake considers an output without metadata up to date while no input is newer, whatever changed.
The sidecar of a record has the settings, code and flags that it was made with, even after results
were copied.
"""

import glob
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from snakemake.persistence import ParamsChange  # type: ignore[import-untyped]

from expertflow.config.code_digest import rule_digest
from expertflow.config.guard import note
from expertflow.config.run_lock import try_hold
from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file, sha256_json, sha256_text, sidecar_of
from expertflow.core.records import read_record
from expertflow.core.sidecars import SIDECARS, Sidecar, files_of, record_of, was_there_before
from expertflow.rental.bundle.records import OPENED


def remove_corrupt_records(results: Path, *, looks: bool) -> None:
    """Remove records that are not JSON, with a line for each; a run that only looks just reports.

    Snakemake considers a file made if it exists. An edited one is left alone: ``verify_results.py``
    reports it. So is one of an expert that another run is making.
    """
    found = list(corrupt_records(results))
    if looks:
        for path in found:
            note(
                f"{path} or its sidecar is truncated or empty; a run removes it and makes it again"
            )
        return
    for expert in sorted({path.relative_to(results).parts[0] for path in found}):
        with try_hold(expert) as ours:
            if ours:
                # Checked again: another run may have made it in the meantime.
                for path in list(corrupt_records(results, glob.escape(expert))):
                    path.unlink()
                    note(
                        f"{path} or its sidecar was truncated or empty, and was removed; it is made"
                        " again when it is needed"
                    )


def corrupt_records(results: Path, expert: str = "*") -> Iterator[Path]:
    """Yield records and sidecars that are not JSON, and records whose sidecar is not."""
    for sidecar in sorted(results.glob(f"{expert}/**/{SIDECARS}")):
        record, is_complete = record_of(sidecar), _is_json(sidecar)
        if record.is_file() and not (is_complete and _is_json(record)):
            yield record
        if not is_complete:
            yield sidecar


def note_missing_files(results: Path) -> None:
    """Report missing files of finished jobs; Snakemake notices only those its next jobs need."""
    gone: dict[str, list[Path]] = {}
    for sidecar in sorted(results.glob(f"*/**/{SIDECARS}")):
        expert = sidecar.relative_to(results).parts[0]
        # A bundle leaves out what is no longer needed; files elsewhere are the user's.
        if not (results / expert / OPENED).is_file():
            with suppress(DataError):
                files = [path for path in files_of(sidecar) if path.is_relative_to(results)]
                gone.setdefault(expert, []).extend(f for f in files if not f.exists())
    for first, *others in filter(None, gone.values()):
        what = f"{first} and {len(others)} more files are" if others else f"{first} is"
        note(
            f"{what} gone, though still listed by a record; a run makes again only what it needs."
            " make verify lists all; make repair has all made again, which may repeat a training"
        )


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except FileNotFoundError:
        # Another run is making it again.
        return True
    except ValueError:
        return False
    return True


def use_sidecars(persistence: Any, stage_of: Callable[[Any], str | None]) -> None:
    """Make Snakemake use the sidecar of a job's record if it has no readable metadata for it."""
    read_metadata, has_metadata = persistence._read_record, persistence.has_metadata
    params_changed, input_checksums = persistence.params_changed, persistence.input_checksums

    def read(key: str) -> Any:
        # Snakemake itself copes with truncated JSON, but with nothing else.
        with suppress(ValueError):
            return read_metadata(key)
        return None

    @cache
    def sidecar(job: Any) -> Sidecar | None:
        record = job.output.get("record")
        # Jobs of an including Snakefile have no sidecars.
        if record is None or stage_of(job) is None or has_metadata(job):
            return None
        with suppress(DataError):
            return read_record(Sidecar, sidecar_of(Path(record)))
        return None

    def changed(job: Any, file: Any = None) -> Any:
        made = sidecar(job)
        if made is None:
            return params_changed(job, file=file)
        spec, flags = job.params.get("spec", "{}"), job.params.get("flags")
        # Sets, because Snakemake shows what is only in one of them as the reason to rerun.
        old = {f"settings {made.spec_sha256}", f"code {made.code}"}
        new = {f"settings {sha256_text(spec)}", f"code {rule_digest(str(stage_of(job)))}"}
        if made.flags_sha256:
            old.add(f"flags {made.flags_sha256}")
            new |= {f"flags {sha256_json([*flags])}"} if flags is not None else set()
        return ParamsChange(only_old=old - new, only_new=new - old, files={made.output})

    def checksums(job: Any, path: Any) -> set[Any]:
        made = sidecar(job)
        # The current file counts as the one that the job read: content decides, not time.
        if made is not None and was_there_before(Path(path), made):
            return {f"sha256:{sha256_file(Path(path))}"}
        return set(input_checksums(job, path))

    persistence._read_record = read
    persistence.has_metadata = lambda job: has_metadata(job) or sidecar(job) is not None
    persistence.params_changed, persistence.input_checksums = changed, checksums
