"""Collect the contents of a bundle or an outcome.

A bundle has all that staging, training and the report read. An outcome is what a GPU machine
returns: results, records and logs, laid out where a run would put them.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from expertflow.chain import expand_path, stages_before
from expertflow.core.errors import DataError
from expertflow.core.files import (
    canonical_json,
    sha256_file,
    sha256_json,
    sha256_text,
    sidecar_of,
)
from expertflow.core.records import read_part, read_record, to_json
from expertflow.data.records import DocumentsRecord, ExpertLock, ShardRecord
from expertflow.data.shards import shard_names
from expertflow.rental.bundle.provenance import (
    Provenance,
    adapt_inputs,
    provenance_text,
    read_provenance,
)
from expertflow.rental.bundle.records import (
    ABLATION,
    CARRIED,
    FOLDERS,
    MODEL,
    OPENED,
    PROVENANCE,
    REPORT,
    TIMESTAMP,
    TOKENIZER,
    BundleIndex,
    BundleSpec,
    Member,
    Opened,
    own_artifact,
    own_tuning,
)
from expertflow.rental.bundle.tar import Items, describe
from expertflow.staging.records import StagingRecord
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train.model.base import wanted_files, weight_files
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)
# In an outcome.
RECORDS = ("*.json", "*.jsonl", "*.html", ".*.fingerprint")
STAGING = "staging.json"


def pack_bundle(spec: BundleSpec) -> tuple[BundleIndex, Items]:
    """Collect a bundle; raise DataError if something is missing or disagrees with its records."""
    results = Path("results", spec.expert)
    lock = read_record(ExpertLock, results / "sources.lock.json")
    model = read_record(ModelRecord, results / "model.json")
    items = _data_items(results, lock, spec.asked)
    items |= _user_items(spec) | _artifact_items(results, spec)
    items |= _folder_items(results / "packed") | _folder_items(results / TOKENIZER)
    if model.kind == "builtin":
        items |= _folder_items(results / MODEL)
    else:
        items |= _model_items(results, model, with_weights=spec.with_weights)
    for name, path in items.items():
        if isinstance(path, Path) and not path.is_file():
            raise DataError(f"{path}: is missing, needed for {name}; run again to make it")
    items[f"{results}/{PROVENANCE}"] = _provenance_text(spec, items)
    members = describe(items)
    _check_recorded(results, members, lock=lock, model=model)
    named = {name: replace(f, path=f"{CARRIED}/{name}") for name, f in spec.files.items()}
    if spec.own_code is not None:
        log.warning("it carries your own code, %s; opening needs --allow-own-code", spec.own_code)
    index = BundleIndex(
        kind="bundle",
        expert=spec.expert,
        code=spec.code,
        members=members,
        spec=replace(spec, files=named),
        lock=lock,
    )
    return index, items


def _data_items(results: Path, lock: ExpertLock, asked: list[str]) -> Items:
    """Return the records of all stages before the bundle and the files beside them; no folders."""
    files = [results / "sources.lock.json"]
    files += [results / "sources" / "locked" / f"{source.name}.json" for source in lock.sources]
    for stage in stages_before("make_bundle", asked=asked):
        records = [results / path for path in expand_path(stage, stage.record, lock.sources)]
        files += records
        files += [note for record in records if (note := sidecar_of(record)).is_file()]
        for key, path in stage.files.items():
            if key not in stage.stays and not path.endswith("/"):
                files += [results / place for place in expand_path(stage, path, lock.sources)]
    return {file.as_posix(): file for file in files}


def _folder_items(folder: Path) -> Items:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != TIMESTAMP]
    if not files:
        raise DataError(f"{folder}: is empty; delete its record and run again")
    return {**{file.as_posix(): file for file in files}, f"{folder.as_posix()}/{TIMESTAMP}": b""}


def _user_items(spec: BundleSpec) -> Items:
    items: Items = {}
    for name, file in spec.files.items():
        if sha256_file(Path(file.path)) != file.sha256:
            raise DataError(f"{file.path}: changed while the bundle was made; run again")
        items[f"results/{spec.expert}/{CARRIED}/{name}"] = Path(file.path)
    for key, place in spec.own_artifacts.items():
        items[own_artifact(spec.expert, key, place)] = Path(spec.artifacts[key]).expanduser()
    if spec.tuned is not None:
        items[own_tuning(spec.expert)] = Path(spec.tuned).expanduser()
    return items


def _artifact_items(results: Path, spec: BundleSpec) -> Items:
    items: Items = {}
    for path in (Path(p) for key, p in spec.artifacts.items() if key not in spec.own_artifacts):
        items |= _folder_items(path) if path.is_dir() else {path.as_posix(): path}
        source = path.relative_to(results).parts[2]
        items[f"{results}/sources/generated/{source}/{TIMESTAMP}"] = b""
    return items


def _model_items(results: Path, model: ModelRecord, *, with_weights: bool) -> Items:
    """Return tokenizer and settings of a hub or local model, and its weights if requested."""
    folder, record = Path(model.path), results / "model.json"
    if not (weights := set(weight_files(folder))):
        raise DataError(f"{folder}: the base model is gone; delete {record} and run again")
    wanted = [path for path in wanted_files(folder) if with_weights or path not in weights]
    items: Items = {f"{results}/{MODEL}/{path.name}": path for path in wanted}
    moved = _json_text(to_json(replace(model, path=f"{results}/{MODEL}")))
    items |= {f"{results}/{MODEL}/{TIMESTAMP}": b"", record.as_posix(): moved}
    return items | _changed_sidecar(record, sha256=hashlib.sha256(moved).hexdigest())


def _changed_sidecar(record: Path, **changes: str) -> Items:
    note = sidecar_of(record)
    if not note.is_file():
        return {}
    value = json.loads(note.read_text(encoding="utf-8"))
    return {note.as_posix(): _json_text({**value, **changes})}


def _json_text(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _provenance_text(spec: BundleSpec, items: Items) -> bytes:
    records = read_provenance(spec.expert, items)
    # The user's files are absent and unused.
    names: dict[str, str | None] = dict.fromkeys(spec.content)
    if spec.tuned is not None:
        names[str(Path(spec.tuned).expanduser())] = own_tuning(spec.expert)
    record = f"results/{spec.expert}/model.json"
    hashes = {}
    if isinstance(content := items[record], bytes):
        hashes[record] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    outputs = {n for n in items if sidecar_of(Path(n)).as_posix() in items}
    if unrecorded := sorted(outputs - set(records)):
        log.warning(
            "Snakemake has no record of %s and %d more outputs: where the bundle is opened, later"
            " changes of their settings go unnoticed",
            unrecorded[0],
            len(unrecorded) - 1,
        )
    return provenance_text(adapt_inputs(records, names, hashes))


def _check_recorded(
    results: Path, members: Iterable[Member], *, lock: ExpertLock, model: ModelRecord
) -> None:
    found = {member.name: member.sha256 for member in members}
    for file, record, sha256 in _recorded_hashes(results, lock, model):
        if found.get(file.as_posix()) != sha256:
            raise DataError(f"{file}: is not what {record} says; delete {record} and run again")
    folder, record = results / MODEL, results / "model.json"
    weights = sorted(n for n in found if Path(n).parent == folder and n.endswith(".safetensors"))
    # Weights that are not packed are checked when the bundle is opened.
    if weights and sha256_json([found[name] for name in weights]) != model.weights_sha256:
        raise DataError(f"{folder}: is not what {record} says; delete {record} and run again")


def _recorded_hashes(
    results: Path, lock: ExpertLock, model: ModelRecord
) -> Iterator[tuple[Path, Path, str]]:
    packing = read_record(PackingRecord, results / "packing.json")
    for split, packed in (("train", packing.train), ("held_out", packing.held_out)):
        yield results / "packed" / split / ROWS_FILE, results / "packing.json", packed.sha256
    documents = read_record(DocumentsRecord, results / "documents.json")
    yield results / "keep.arrow", results / "documents.json", documents.sha256
    for source in lock.sources:
        for shard in shard_names(source.n_shards):
            record = results / "documents" / source.name / f"{shard}.json"
            yield record.with_suffix(".arrow"), record, read_record(ShardRecord, record).sha256
    for folder, name in ((TOKENIZER, "tokenizer.json"), (MODEL, "model.json")):
        yield results / folder / "tokenizer.json", results / name, model.tokenizer.sha256


def pack_outcome(expert: str) -> tuple[BundleIndex, Items]:
    """Collect an outcome; raise DataError without an opened bundle or a report."""
    results = Path("results", expert)
    if not (results / OPENED).is_file():
        raise DataError(f"{results}: no bundle was opened here; run open_bundle.py first")
    bundle = read_record(Opened, results / OPENED).index
    assert bundle.spec is not None
    if not (results / REPORT).is_file():
        raise DataError(f"{results / REPORT}: is missing; run snakemake {results / REPORT} first")
    came = {member.name: member for member in bundle.members}
    items: Items = {path.as_posix(): path for path in _result_files(results)}
    known = (name for name in sorted(items) if name in came)
    brought = tuple(name for name in known if came[name].sha256 == sha256_file(Path(name)))
    records = read_provenance(expert, set(items).difference(brought))
    items |= _staged_at_home(results, bundle.spec, records)
    items[f"{results}/{PROVENANCE}"] = provenance_text(records)
    index = BundleIndex(
        kind="outcome",
        expert=expert,
        code=bundle.code,
        members=describe(items),
        brought=brought,
    )
    return index, items


def _result_files(results: Path) -> list[Path]:
    found = [path for pattern in RECORDS for path in results.glob(pattern)]
    folders = {*FOLDERS, "logs", ABLATION}
    if read_part(str, results / "training.json", "method") == "full":
        folders.remove("checkpoint")
    for folder in folders:
        found += results.joinpath(folder).rglob("*")
    return [path for path in found if path.is_file()]


def _staged_at_home(results: Path, spec: BundleSpec, records: Provenance) -> Items:
    """Restore the staging settings of the bundle's origin in Snakemake's records.

    This machine's ``scratch`` affects no result; with it the origin would stage and train again.
    """
    settings = (read_record(StagingRecord, results / STAGING).spec, spec.staging)
    used, at_home = (canonical_json(to_json(each)) for each in settings)
    if record := records.get(f"{results}/{STAGING}"):
        # Snakemake stores params as Python literals.
        params = [repr(at_home) if p == repr(used) else p for p in record["params"] or ()]
        record["params"] = sorted(params)
    return _changed_sidecar(results / STAGING, spec_sha256=sha256_text(at_home))
