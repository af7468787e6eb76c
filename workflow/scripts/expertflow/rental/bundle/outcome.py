"""What a GPU machine hands back: results, records and logs, laid out where a run would put them."""

import json
import logging
from pathlib import Path

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import canonical_json, remove, sha256_file, sha256_text, sync_directory
from expertflow.core.records import read_part, read_record, to_json
from expertflow.rental.bundle.open import adopt_provenance, hold_expert, is_same, unpack
from expertflow.rental.bundle.provenance import Provenance, provenance_text, read_provenance
from expertflow.rental.bundle.records import (
    CARRIED,
    FORMAT,
    OPENED,
    PROVENANCE,
    TIMESTAMP,
    BundleIndex,
    BundleSpec,
    Opened,
    sidecar_of,
)
from expertflow.rental.bundle.tar import Items, describe
from expertflow.staging.records import StagingRecord

log = logging.getLogger(__name__)

RECORDS = ("*.json", "*.jsonl", "*.html", ".*.fingerprint")
FOLDERS = ("merged", "checkpoint", "profile")
REPORT, STAGING, ABLATION = "report.json", "staging.json", "ablation"
# An outcome of other rows or of another plan is not of these results.
DECISIVE = ("packing.json", "plan.json")


def pack_outcome(expert: str) -> tuple[BundleIndex, Items]:
    """Collect what was made from an opened bundle in the working directory.

    Checkpoints of a full fine-tuning stay behind: they hold the weights that ``merged`` holds.

    Raises:
        DataError: no bundle was opened here, or there is no report yet.
    """
    results = Path("results", expert)
    if not (results / OPENED).is_file():
        raise DataError(f"{results}: no bundle was opened here; run open_bundle.py first")
    bundle = read_record(Opened, results / OPENED).index
    assert bundle.spec is not None
    if not (results / REPORT).is_file():
        raise DataError(f"{results / REPORT}: is missing; run snakemake {results / REPORT} first")
    came = {member.name: member for member in bundle.members}
    items: Items = {path.as_posix(): path for path in _result_files(results)}
    brought = tuple(n for n in sorted(items) if n in came and came[n].sha256 == _sha256(items[n]))
    made = set(items).difference(brought)
    folders = {str(parent) for name in made for parent in Path(name).parents}
    records = read_provenance(expert, lambda key: key in made or key in folders)
    items |= _staged_at_home(results, bundle.spec, records)
    items[f"{results}/{PROVENANCE}"] = provenance_text(records)
    index = BundleIndex(
        format=FORMAT,
        kind="outcome",
        expert=expert,
        code=bundle.code,
        members=describe(items),
        brought=brought,
    )
    return index, items


def land_outcome(
    outcome: Path, index: BundleIndex, directory: Path, *, may_replace: bool = False
) -> None:
    """Lay an outcome, of which the index was read, out in a working directory; checked.

    What came to the GPU machine with its bundle is only laid out where it is missing. The report
    comes last; stopped half-way, the same command finishes it.

    Raises:
        ConfigError: other results are there and may not be dropped, or a run makes the expert.
        DataError: this is no outcome, or it was changed.
    """
    if index.kind != "outcome":
        raise DataError(f"{outcome}: is a {index.kind}; open it without --outcome")
    results = directory / "results" / index.expert
    with hold_expert(directory, index.expert):
        if not may_replace:
            _refuse_others(index, directory)
        with unpack(outcome, index, results) as partial:
            adopt_provenance(partial, directory, index)
            remove(partial / CARRIED)
            _move_in(index, partial, results)
    if (results / f"{ABLATION}.json").is_file():
        log.info(
            "%s: its report shows an ablation; keep ablate=true in the configuration here, with the"
            " same ablation settings, or the report is built again without it",
            index.expert,
        )


def _sha256(content: Path | bytes) -> str:
    return sha256_file(content) if isinstance(content, Path) else ""


def _result_files(results: Path) -> list[Path]:
    found = [path for pattern in RECORDS for path in results.glob(pattern)]
    folders = {*FOLDERS, "logs", ABLATION}
    if read_part(str, results / "training.json", "method") == "full":
        folders.remove("checkpoint")
    for folder in folders:
        found += results.joinpath(folder).rglob("*")
    return [path for path in found if path.is_file()]


def _staged_at_home(results: Path, spec: BundleSpec, records: Provenance) -> Items:
    """Let Snakemake find at home the staging settings that the bundle was made with.

    Where this machine copied to decides no result, and with its ``scratch`` home would stage, train
    and evaluate again. The record itself says what was done here.
    """
    used = _spec_text(read_record(StagingRecord, results / STAGING).spec)
    at_home = _spec_text(spec.staging)
    if record := records.get(f"{results}/{STAGING}"):
        # Snakemake keeps params as they are written in Python.
        params = [repr(at_home) if p == repr(used) else p for p in record["params"] or ()]
        record["params"] = sorted(params)
    note = sidecar_of(results / STAGING)
    if not note.is_file():
        return {}
    value = json.loads(note.read_text(encoding="utf-8"))
    value["spec_sha256"] = sha256_text(at_home)
    return {note.as_posix(): (json.dumps(value, indent=2) + "\n").encode()}


def _spec_text(spec: object) -> str:
    return canonical_json(to_json(spec))


def _refuse_others(index: BundleIndex, directory: Path) -> None:
    for member in index.members:
        path = directory / member.name
        name = member.name.split("/", 2)[2]
        is_free = name.startswith((CARRIED, "logs/")) or name.endswith(TIMESTAMP)
        is_kept = member.name in index.brought and name not in DECISIVE
        if is_free or is_kept or not path.exists():
            continue
        if not is_same(path, member.n_bytes, member.sha256):
            raise ConfigError(
                f"{path}: is not of this outcome; move it away, use --directory, or drop it with"
                " --replace"
            )


def _move_in(index: BundleIndex, partial: Path, results: Path) -> None:
    for folder in FOLDERS:
        if (partial / folder).is_dir():
            remove(results / folder)
    files = [path for path in partial.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda file: file.name == REPORT):
        name = path.relative_to(partial).as_posix()
        target = results / name
        if not (f"results/{index.expert}/{name}" in index.brought and target.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    sync_directory(results)
