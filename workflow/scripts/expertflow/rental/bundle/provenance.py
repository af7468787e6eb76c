"""Carry Snakemake's own records of outputs from one working directory to another.

Without them Snakemake accepts existing files and misses later changes of settings or code. Times,
process and environment differ between runs and machines, and are not carried.
"""

import json
import logging
from base64 import urlsafe_b64decode
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json
from expertflow.core.records import Record, from_json, to_json
from expertflow.rental.bundle.tar import AGAIN, is_inside, parse_json

log = logging.getLogger(__name__)
METADATA = Path(".snakemake", "metadata")

Provenance = dict[str, dict[str, Any]]


class JobRecord(Record, frozen=True, kw_only=True):
    """The carried part of a Snakemake record, under Snakemake's names."""

    rule: str | None = None
    input: tuple[str, ...] | None = None
    log: tuple[str, ...] | None = None
    params: tuple[str, ...] | None = None
    code: str | None = None
    record_format_version: int
    input_checksums: dict[str, str] | None = None


def read_provenance(expert: str, outputs: Collection[str]) -> Provenance:
    """Return the records of every job behind the wanted outputs, by output."""
    wanted = {*outputs, *(str(parent) for name in outputs for parent in Path(name).parents)}
    found: Provenance = {}
    for path in sorted(METADATA.rglob("*")):
        if path.is_file():
            # Snakemake splits a long name into folders that begin with @.
            name = "".join(part.removeprefix("@") for part in path.relative_to(METADATA).parts)
            try:
                key = urlsafe_b64decode(name).decode()
                if key.startswith(f"results/{expert}/"):
                    found[key] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                log.warning("%s: is no record of Snakemake's; left out", path)
    jobs = {_job(record) for key, record in found.items() if key in wanted}
    names = JobRecord.__struct_fields__
    return {
        key: {name: record.get(name) for name in names}
        for key, record in sorted(found.items())
        if _job(record) in jobs
    }


def adapt_inputs(
    records: Provenance, names: Mapping[str, str | None], hashes: Mapping[str, str]
) -> Provenance:
    """Rename inputs, or drop those whose new name is null, and set the hashes of others."""
    adapted = {}
    for key, record in records.items():
        old = record["input_checksums"] or {}
        checksums = {names.get(name, name): hashes.get(name, old[name]) for name in old}
        inputs = [names.get(name, name) for name in record["input"] or ()]
        adapted[key] = {
            **record,
            # Sorted, as Snakemake compares them.
            "input": sorted(name for name in inputs if name is not None),
            "input_checksums": {name: checksums[name] for name in checksums if name is not None},
        }
    return adapted


def write_provenance(directory: Path, text: bytes, *, expert: str, time_s: float) -> None:
    """Write an expert's records for Snakemake; raise DataError for malformed ones."""
    # Its layout is not documented, so its own class writes it.
    from snakemake.persistence import MetadataRecord  # type: ignore[import-untyped]
    from snakemake.persistence.file import FilePersistence  # type: ignore[import-untyped]

    records = _check_records(text, expert)
    place = directory / METADATA.parent
    place.mkdir(parents=True, exist_ok=True)
    store = FilePersistence(path=place.absolute())
    for key, record in records.items():
        whole = MetadataRecord(**record, starttime=time_s, endtime=time_s, incomplete=False)
        store._write_record(key, whole)


def _check_records(text: bytes, expert: str) -> Provenance:
    where = "the bundle's records of Snakemake"
    records = parse_json(text, where)
    if not isinstance(records, dict):
        raise DataError(f"{where}: are no object; {AGAIN}")
    if odd := [key for key in records if not is_inside(key, expert)]:
        raise DataError(f"record of {odd[0]!r:.120}: does not lie in results/{expert}; {AGAIN}")
    return {
        key: to_json(from_json(JobRecord, record, where=f"record of {key}"))
        for key, record in records.items()
    }


def _job(record: dict[str, object]) -> str:
    return canonical_json([record.get("rule"), record.get("log")])
