"""Carry Snakemake's own records of outputs from one working directory to another.

Without them it takes over what is there and no longer sees that settings or code changed since.
What differs from run to run and from box to box stays behind: times, process and environment.
"""

import json
import logging
from base64 import urlsafe_b64decode
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json
from expertflow.core.records import from_json, to_json

log = logging.getLogger(__name__)
METADATA = Path(".snakemake", "metadata")
KEPT = ("rule", "input", "log", "params", "code", "record_format_version", "input_checksums")

Provenance = dict[str, dict[str, Any]]


def read_provenance(expert: str, wanted: Callable[[str], bool]) -> Provenance:
    """Give what Snakemake recorded of the jobs that made an expert's outputs, by output.

    ``wanted`` picks outputs; a job counts with all of its outputs if one of them is picked.
    """
    found = {key: _read(path) for path, key in _records(f"results/{expert}/")}
    jobs = {_job(record) for key, record in found.items() if record and wanted(key)}
    return {
        key: {name: record.get(name) for name in KEPT}
        for key, record in sorted(found.items())
        if record and _job(record) in jobs
    }


def without_inputs(records: Provenance, absent: Collection[str]) -> Provenance:
    """Leave out inputs that the box that opens the bundle will not have, and will not ask for."""
    return {
        key: {
            **record,
            "input": [name for name in record["input"] or () if name not in absent],
            "input_checksums": {
                name: sha256
                for name, sha256 in (record["input_checksums"] or {}).items()
                if name not in absent
            },
        }
        for key, record in records.items()
    }


def with_moved_input(records: Provenance, name: str, moved: str) -> Provenance:
    """Put another name in the place of an input's."""
    return {
        key: {
            **record,
            # Sorted, as Snakemake compares them.
            "input": sorted(moved if own == name else own for own in record["input"] or ()),
            "input_checksums": {
                moved if own == name else own: sha256
                for own, sha256 in (record["input_checksums"] or {}).items()
            },
        }
        for key, record in records.items()
    }


def with_checksum(records: Provenance, name: str, sha256: str) -> Provenance:
    """Put another hash in the place of an input's."""
    return {
        key: {
            **record,
            "input_checksums": {
                own: f"sha256:{sha256}" if own == name else old
                for own, old in record["input_checksums"].items()
            },
        }
        for key, record in records.items()
    }


def provenance_text(records: Provenance) -> bytes:
    """Write the records as one JSON text."""
    return canonical_json(records).encode()


def write_provenance(directory: Path, text: str, *, expert: str, time_s: float) -> None:
    """Tell Snakemake in a working directory how an expert's outputs were made, as if at ``time_s``.

    Raises:
        DataError: a record is of another output, or not of Snakemake's form.
    """
    # Its layout is not documented, so its own class writes it.
    from snakemake.persistence import MetadataRecord  # type: ignore[import-untyped]
    from snakemake.persistence.file import FilePersistence  # type: ignore[import-untyped]

    place = directory / METADATA.parent
    place.mkdir(parents=True, exist_ok=True)
    store = FilePersistence(path=place.absolute())
    for key, record in _checked(text, expert).items():
        whole = MetadataRecord(**record, starttime=time_s, endtime=time_s, incomplete=False)
        store._write_record(key, whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """What is kept of a record of Snakemake's, by its names."""

    rule: str | None
    input: tuple[str, ...] | None
    log: tuple[str, ...] | None
    params: tuple[str, ...] | None
    code: str | None
    record_format_version: int
    input_checksums: dict[str, str] | None


def _checked(text: str, expert: str) -> Provenance:
    """Read records from a bundle; they may speak of this expert's results, and of nothing else."""
    records = json.loads(text)
    if not isinstance(records, dict):
        raise DataError("the bundle's records of Snakemake are no object; make the bundle again")
    checked = {}
    for key, record in records.items():
        inside = key.startswith(f"results/{expert}/") and ".." not in Path(key).parts
        if not inside:
            raise DataError(
                f"record of {key}: does not lie in results/{expert}; make the bundle again"
            )
        kept = from_json(_Kept, record, where=f"record of {key}")
        checked[key] = to_json(kept)
    return checked


def _job(record: dict[str, Any]) -> str:
    """Name the job behind a record: every job has a log of its own."""
    return canonical_json([record.get("rule"), record.get("log")])


def _records(prefix: str) -> list[tuple[Path, str]]:
    """List files and outputs of the records; a long name is cut into folders that begin with @."""
    found = []
    for path in sorted(METADATA.rglob("*")) if METADATA.is_dir() else []:
        if path.is_file():
            name = "".join(part.removeprefix("@") for part in path.relative_to(METADATA).parts)
            try:
                key = urlsafe_b64decode(name).decode()
            except ValueError:
                log.warning("%s: is no record of Snakemake's; left out", path)
                continue
            if key.startswith(prefix):
                found.append((path, key))
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        log.warning("%s: is damaged; left out", path)
        return None
    return record
