"""Collect the contents of a bundle, or of the outcome that a GPU machine returns.

A bundle contains all that staging, training and the report read; an outcome contains results,
records and logs.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.chain import expand_path, stages_before
from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json, sha256_file, sha256_text, sidecar_of
from expertflow.core.records import REPAIR, read_part, read_record, seal, to_json
from expertflow.core.sidecars import TIMESTAMP, Sidecar, check_inputs, check_unmoved
from expertflow.data.records import ExpertLock
from expertflow.rental.bundle import records
from expertflow.rental.bundle.records import BundleIndex, BundleSpec, OpenedBundle
from expertflow.rental.bundle.tar import Items, describe_items
from expertflow.train.model.base import list_model_files, weight_files
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)
# Records in an outcome.
RECORDS = ("*.json", "*.jsonl", "*.html", ".*.fingerprint")


def pack_bundle(spec: BundleSpec) -> tuple[BundleIndex, Items]:
    """Collect a bundle; raise DataError if something is missing or disagrees with its records."""
    results = Path("results", spec.expert)
    lock = read_record(ExpertLock, results / "sources.lock.json")
    model = read_record(ModelRecord, results / "model.json")
    items = _data_items(results, lock, spec.asked) | _user_items(spec)
    items |= _folder_items(results / "packed") | _folder_items(results / "tokenizer")
    if model.kind == "builtin":
        items |= _folder_items(results / "base_model")
    else:
        items |= _model_items(results, model, with_weights=spec.with_weights)
    for name, path in items.items():
        if isinstance(path, Path) and not path.is_file():
            raise DataError(f"{path}: is missing, needed for {name}; {REPAIR}")
    paths = [path for path in items.values() if isinstance(path, Path)]
    # By the sidecars' hashes: damage would otherwise be found only after the trip.
    stamps = check_inputs(path for path in paths if sidecar_of(path).is_file())
    members = describe_items(items)
    check_unmoved(stamps)
    if spec.own_code is not None:
        log.warning("it carries your own code, %s; opening needs --allow-own-code", spec.own_code)
    # The index lists settings files by their path in the bundle.
    carried = {n: replace(f, path=f"{records.CARRIED}/{n}") for n, f in spec.files.items()}
    index = BundleIndex(
        kind="bundle",
        expert=spec.expert,
        code=spec.code,
        members=members,
        spec=replace(spec, files=carried),
        lock=lock,
    )
    return index, items


def _data_items(results: Path, lock: ExpertLock, asked: list[str]) -> Items:
    """Return the records and files of all stages before the bundle; no folders."""
    files, unrecorded = [results / "sources.lock.json"], []
    files += [results / "sources" / "locked" / f"{source.name}.json" for source in lock.sources]
    for stage in stages_before("make_bundle", asked=asked):
        made = [results / path for path in expand_path(stage, stage.record, lock.sources)]
        if stage.name == "check_references":
            # Without it, a machine that has what scoring needs checks them before it trains.
            if read_record(dict[str, Any], made[0])["unavailable_reason"] is not None:
                continue
        files += [*made, *filter(Path.is_file, map(sidecar_of, made))]
        unrecorded += [path for path in made if not sidecar_of(path).is_file()]
        for key, path in stage.files.items():
            # Folders are packed elsewhere, because they need Snakemake's timestamp file.
            if key not in stage.stays and not path.endswith("/"):
                files += [results / place for place in expand_path(stage, path, lock.sources)]
    if unrecorded:
        log.warning(
            "%s and %d more records have no sidecar: damage goes unnoticed, as do later changes of"
            " their settings where the bundle is opened",
            unrecorded[0],
            len(unrecorded) - 1,
        )
    return {file.as_posix(): file for file in files}


def _folder_items(folder: Path) -> Items:
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != TIMESTAMP]
    if not files:
        raise DataError(f"{folder}: is empty; delete its record and run again")
    # Snakemake keeps a folder's timestamp in this file; opening the bundle sets it.
    return {file.as_posix(): file for file in files} | {f"{folder}/{TIMESTAMP}": b""}


def _user_items(spec: BundleSpec) -> Items:
    """Return the settings, the tuning, and what scoring reads: the user's or generated files."""
    results, items = Path("results", spec.expert), Items()
    for name, file in spec.files.items():
        if sha256_file(Path(file.path)) != file.sha256:
            raise DataError(f"{file.path}: changed while the bundle was being made; run again")
        items[f"{results}/{records.CARRIED}/{name}"] = Path(file.path)
    if spec.tuned is not None:
        items[records.tuning_path(spec.expert)] = Path(spec.tuned).expanduser()
        # Its path differs there, which the plan's flags would report as a change.
        items |= _changed_sidecar(results / "plan.json", flags_sha256="")
    for key, place in spec.artifacts.items():
        path = Path(place)
        if key in spec.own_artifacts:
            name = records.artifact_path(spec.expert, key, spec.own_artifacts[key])
            items[name] = path.expanduser()
            continue
        items |= _folder_items(path) if path.is_dir() else {path.as_posix(): path}
        source = path.relative_to(results).parts[2]
        items[f"{results}/sources/generated/{source}/{TIMESTAMP}"] = b""
    return items


def _model_items(results: Path, model: ModelRecord, *, with_weights: bool) -> Items:
    """Return tokenizer and settings of a hub or local model, and its weights if requested."""
    folder, record, target = Path(model.path), results / "model.json", results / "base_model"
    if not (weights := set(weight_files(folder))):
        raise DataError(f"{folder}: the base model is missing; delete {record} and run again")
    # Weights grown here exist nowhere else.
    with_weights |= folder == target and not any(map(Path.is_symlink, weights))
    wanted = [path for path in list_model_files(folder) if with_weights or path not in weights]
    items: Items = {f"{target}/{path.relative_to(folder).as_posix()}": path for path in wanted}
    # The record has this machine's path; on the other machine, the model is in results/.
    moved = _json_text(to_json(replace(model, path=str(target))))
    items |= {f"{target}/{TIMESTAMP}": b"", record.as_posix(): moved}
    own = hashlib.sha256(moved).hexdigest()
    note = sidecar_of(record)
    known = read_record(Sidecar, note).files if note.is_file() else {}
    files = {f"{target.name}/{Path(name).name}": sha256 for name, sha256 in known.items()}
    return items | _changed_sidecar(record, sha256=own, files=files)


def _changed_sidecar(record: Path, **changes: object) -> Items:
    note = sidecar_of(record)
    if not note.is_file():
        return {}
    changed = replace(read_record(Sidecar, note), **changes)
    return {note.as_posix(): _json_text(seal(to_json(changed)))}


def _json_text(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def pack_outcome(expert: str) -> tuple[BundleIndex, Items]:
    """Collect an outcome; raise DataError without an opened bundle or a report."""
    results = Path("results", expert)
    if not (results / records.OPENED).is_file():
        raise DataError(f"{results}: no bundle was opened here; run open_bundle.py first")
    bundle = read_record(OpenedBundle, results / records.OPENED).index
    assert bundle.spec is not None
    report = results / "report.json"
    if not report.is_file():
        raise DataError(f"{report}: is missing; run snakemake {report} first")
    # What came with the bundle and is unchanged is already at home.
    came = {member.name: member.sha256 for member in bundle.members}
    # All weights are in merged/, too, which is as large as the checkpoint.
    trained, left = results / "training.json", results / "checkpoint"
    is_left = read_part(str, trained, "method") == "full"
    items: Items = {
        path.as_posix(): path
        for path in _result_files(results)
        if not (is_left and path.is_relative_to(left))
    }
    brought = tuple(n for n in sorted(items) if n in came and came[n] == sha256_file(Path(n)))
    # The origin's staging settings; with others it would stage and train again.
    at_home = canonical_json(to_json(bundle.spec.staging))
    items |= _changed_sidecar(results / "staging.json", spec_sha256=sha256_text(at_home))
    if is_left and sidecar_of(trained).is_file():
        # A repair at home would take it for lost, and the training would run again.
        made = read_record(Sidecar, sidecar_of(trained)).files
        files = {n: sha256 for n, sha256 in made.items() if Path(n).parts[0] != left.name}
        items |= _changed_sidecar(trained, files=files)
    index = BundleIndex(
        kind="outcome",
        expert=expert,
        code=bundle.code,
        members=describe_items(items),
        brought=brought,
    )
    return index, items


def _result_files(results: Path) -> list[Path]:
    found = [path for pattern in RECORDS for path in results.glob(pattern)]
    for folder in {*records.FOLDERS, "logs", "ablation"}:
        found += results.joinpath(folder).rglob("*")
    return [path for path in found if path.is_file()]
