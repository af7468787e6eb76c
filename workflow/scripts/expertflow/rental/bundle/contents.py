"""What goes into a bundle: all that is read from staging to the report, and nothing more."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.core.records import read_record, to_json
from expertflow.data.records import ExpertLock, SourceLock
from expertflow.data.shards import shard_names, token_shards
from expertflow.rental.bundle.check import check_made
from expertflow.rental.bundle.model import model_items, model_place
from expertflow.rental.bundle.provenance import (
    provenance_text,
    read_provenance,
    with_checksum,
    with_moved_input,
    without_inputs,
)
from expertflow.rental.bundle.records import (
    CARRIED,
    FORMAT,
    PROVENANCE,
    BundleIndex,
    BundleSpec,
    ModelToFetch,
    SettingsFile,
    own_artefact,
    own_tuning,
)
from expertflow.rental.bundle.tar import Content, Item, describe
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)

Items = dict[str, Item]
# What Snakemake puts into a folder that a rule makes, to tell its time by.
TIMESTAMP = ".snakemake_timestamp"


def pack(spec: BundleSpec, *, git: str | None) -> tuple[BundleIndex, Items]:
    """Collect an expert's bundle from its results in the working directory.

    Raises:
        DataError: something is missing, or not what the manifest's hashes say.
    """
    results = Path("results", spec.expert)
    lock = read_record(ExpertLock, results / "sources.lock.json")
    model = read_record(ModelRecord, results / "model.json")
    items = _data(results, lock, calibrated=bool(spec.config["calibrate"]))
    items |= _folder(results / "packed")
    items |= _artefacts(results, spec)
    if spec.tuned is not None:
        tuned = _there(Path(spec.tuned).expanduser())
        items[own_tuning(spec.expert)] = Item(content=tuned)
    items |= _settings(results, spec)
    if model.kind == "builtin":
        items |= _folder(results / "base_model")
    else:
        items |= model_items(spec.expert, model, with_weights=spec.with_weights)
        items |= _moved_model(results, model)
    records, unrecorded = _provenance(results, spec, items)
    items[f"{results}/{PROVENANCE}"] = Item(content=records)
    members = describe(items)
    check_made(results, members, lock=lock, model=model)
    index = BundleIndex(
        format=FORMAT,
        kind="bundle",
        expert=spec.expert,
        git=git,
        code=spec.code,
        members=members,
        spec=replace(spec, files=_named(spec.files)),
        lock=lock,
        model=_model_to_fetch(model, spec),
        unrecorded=unrecorded,
    )
    return index, items


def with_notes(path: Path) -> Iterator[Path]:
    """Give a record, and the note beside it that says what it was made from, if there is one."""
    yield path
    note = note_of(path)
    if note.is_file():
        yield note


def note_of(record: Path) -> Path:
    """Give the place of the note beside a record."""
    return record.with_name(f".{record.name}.fingerprint")


def _items(files: Iterator[Path] | list[Path]) -> Items:
    return {file.as_posix(): Item(content=_there(file)) for file in files}


def _there(file: Path) -> Path:
    if not file.is_file():
        raise DataError(f"{file}: is missing; run again, so that it is made")
    return file


def _data(results: Path, lock: ExpertLock, *, calibrated: bool) -> Items:
    names = ["datasets.json", "documents.json", "model.json", "packing.json", "plan.json"]
    records = [results / name for name in names + ["calibration.json"] * calibrated]
    files = [results / "sources.lock.json", results / "keep.arrow"]
    for source in lock.sources:
        files.append(results / "sources" / "locked" / f"{source.name}.json")
        records.append(_source_record(results, source))
        for shard in shard_names(source.n_shards):
            records.append(results / "documents" / source.name / f"{shard}.json")
            files.append(results / "documents" / source.name / f"{shard}.arrow")
        for shard in token_shards(source.n_shards):
            records.append(results / "tokens" / source.name / f"{shard}.json")
    return _items(files) | _items(path for record in records for path in with_notes(record))


def _source_record(results: Path, source: SourceLock) -> Path:
    kind = "generated" if source.kind == "generated" else "fetched"
    return results / "sources" / kind / f"{source.name}.json"


def _folder(folder: Path) -> Items:
    """Take a folder with all its files; its time stamp tells Snakemake that it is whole."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != TIMESTAMP)
    if not files:
        raise DataError(f"{folder}: is empty; delete its record and run again")
    stamp: Content = b""
    return {**_items(files), f"{folder.as_posix()}/{TIMESTAMP}": Item(content=stamp)}


def _artefacts(results: Path, spec: BundleSpec) -> Items:
    """Take what scoring reads: of a generator's folder that alone, and the user's own files."""
    items: Items = {}
    for key, place in spec.artefacts.items():
        path = Path(place)
        if key in spec.own_artefacts:
            items[own_artefact(spec.expert, key, place)] = Item(content=_there(path.expanduser()))
            continue
        items |= _folder(path) if path.is_dir() else _items([path])
        source = path.relative_to(results).parts[2]
        items[f"{results}/sources/generated/{source}/{TIMESTAMP}"] = Item(content=b"")
    return items


def _settings(results: Path, spec: BundleSpec) -> Items:
    items: Items = {}
    for name, file in spec.files.items():
        content = _there(Path(file.path))
        if sha256_file(content) != file.sha256:
            raise DataError(f"{content}: changed while the bundle was made; run again")
        items[f"{results}/{CARRIED}/{name}"] = Item(content=content)
    return items


def _named(files: dict[str, SettingsFile]) -> dict[str, SettingsFile]:
    """Name the files of settings by their place in the bundle; not in the box that made it."""
    return {name: replace(file, path=f"{CARRIED}/{name}") for name, file in files.items()}


def _moved_model(results: Path, model: ModelRecord) -> Items:
    """Give the model's record with the place that the model has in an opened bundle."""
    path = results / "model.json"
    moved = replace(model, path=model_place(results.name))
    text = _record_text(moved)
    items: Items = {
        path.as_posix(): Item(content=text),
        f"{results}/base_model/{TIMESTAMP}": Item(content=b""),
    }
    if (note := note_of(path)).is_file():
        value = json.loads(note.read_text(encoding="utf-8"))
        items[note.as_posix()] = Item(content=_record_text({**value, "sha256": _sha256(text)}))
    return items


def _record_text(record: object) -> bytes:
    return (json.dumps(to_json(record), indent=2, ensure_ascii=False) + "\n").encode()


def _sha256(content: bytes) -> str:
    return describe({"": Item(content=content)})[0].sha256


def _model_to_fetch(model: ModelRecord, spec: BundleSpec) -> ModelToFetch | None:
    if model.kind == "builtin" or spec.with_weights:
        return None
    return ModelToFetch(
        name=model.name,
        kind=model.kind,
        revision=model.revision,
        weights_sha256=model.weights_sha256,
        n_weight_bytes=model.n_weight_bytes,
    )


def _provenance(results: Path, spec: BundleSpec, items: Items) -> tuple[bytes, tuple[str, ...]]:
    """Give Snakemake's records as the box that opens the bundle needs them, and what lacks one."""
    folders = {str(parent) for name in items for parent in Path(name).parents}
    records = read_provenance(spec.expert, lambda key: key in items or key in folders)
    records = without_inputs(records, set(spec.content))
    if spec.tuned is not None:
        place = str(Path(spec.tuned).expanduser())
        records = with_moved_input(records, place, own_tuning(spec.expert))
    model = items[f"{results}/model.json"].content
    if isinstance(model, bytes):
        records = with_checksum(records, f"{results}/model.json", _sha256(model))
    made = {note for note in items if note.endswith(".fingerprint")}
    outputs = {str(Path(n).with_name(Path(n).name[1 : -len(".fingerprint")])) for n in made}
    if unrecorded := tuple(sorted(outputs - set(records))):
        log.warning(
            "Snakemake has no record of %s and %d more outputs: where the bundle is opened, later"
            " changes of their settings go unnoticed",
            unrecorded[0],
            len(unrecorded) - 1,
        )
    return provenance_text(records), unrecorded
