"""A bundle's file lets nothing else in; it is opened beside runs, after kills, with any weights."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from crafted_bundles import (
    ITEMS,
    PROVENANCE,
    RECORD,
    Forge,
    all_forgeries,
    index_of,
    make,
    model_record,
    start,
)

from expertflow.core.errors import (
    ConfigError,
    DataError,
    ExpertflowError,
    HardwareError,
    TrainingError,
)
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import read_record
from expertflow.rental.bundle.pack import pack_outcome
from expertflow.rental.bundle.tar import Items, read_bundle, read_index, write_bundle
from expertflow.rental.bundle.unpack import land_outcome, link_weights
from expertflow.train.model.base import hash_weights
from expertflow.train.records import ModelRecord

LONG = "results/e/" + "a-long-folder/" * 20 + "naïve.json"
FORGERIES = all_forgeries()


@pytest.fixture
def items(tmp_path: Path) -> Items:
    (tmp_path / "rows").write_bytes(b"rows" * 300)
    return {**ITEMS, "results/e/rows.arrow": tmp_path / "rows", "results/e/empty": b"", LONG: b"{}"}


def test_members_come_out_as_they_went_in(tmp_path: Path, items: Items) -> None:
    items[PROVENANCE] = json.dumps({"results/e/plan.json": RECORD}).encode()
    assert start(tmp_path / "box", make(tmp_path / "b.tar", items))
    for name, content in items.items():
        found = (tmp_path / "box" / name).read_bytes()
        assert found == (content if isinstance(content, bytes) else content.read_bytes())
    metadata = (tmp_path / "box" / ".snakemake" / "metadata").rglob("*")
    noted = [path for path in metadata if path.is_file()]
    assert [json.loads(path.read_text())["params"] for path in noted] == [["'x'"]]


@pytest.mark.parametrize("title", FORGERIES)
def test_a_forged_bundle_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, title: str
) -> None:
    forge: Forge = FORGERIES[title]
    forge(tmp_path / "b.tar")
    with pytest.raises(ExpertflowError) as refusal:
        start(tmp_path / "box", tmp_path / "b.tar")
    assert len(str(refusal.value)) < 600 + len(str(tmp_path))
    assert str(refusal.value).encode().isascii() or title == "400 bytes"
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]


def test_a_changed_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b.tar", {"results/e/x": b"content"})
    index = read_index(bundle)
    whole = bytearray(bundle.read_bytes())
    for place in range(len(whole)):
        for flip in (0x01, 0x80):
            whole[place] ^= flip
            bundle.write_bytes(whole)
            with pytest.raises(DataError):
                read_bundle(bundle, index, lambda _: (tmp_path / "out").open("wb"))
            whole[place] ^= flip


def test_a_bundle_that_was_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    index = read_index(make(tmp_path / "b.tar"))
    make(tmp_path / "b.tar", code={"a rule": "of other code"})
    with pytest.raises(DataError, match="was replaced while it was opened"):
        read_bundle(tmp_path / "b.tar", index, lambda _: (tmp_path / "out").open("wb"))
    for place in ("none.tar", "."):
        with pytest.raises(DataError, match="no such file; correct the path"):
            read_index(tmp_path / place)


def test_what_could_not_be_opened_is_not_packed(tmp_path: Path, items: Items) -> None:
    with pytest.raises(DataError, match="two of its members have one place"):
        make(tmp_path / "b.tar", {"results/e/A": b"", "results/e/a": b""})
    index = index_of(items)
    (tmp_path / "rows").write_bytes(b"ROWS" * 300)
    with pytest.raises(DataError, match="changed while it was packed"):
        write_bundle(tmp_path / "b.tar", index, items)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


LOCK = Path(".snakemake", "expertflow", "e.lock")


@contextmanager
def run_at_work(folder: Path) -> Iterator[None]:
    lock = folder / LOCK
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write('{"host": "a-host", "pid": 123}')
        stream.flush()
        yield


def test_a_run_that_makes_the_expert_is_left_alone(tmp_path: Path) -> None:
    path = make(tmp_path / "b.tar")
    (tmp_path / LOCK).parent.mkdir(parents=True)
    (tmp_path / LOCK).write_text('{"host": "h", "pid": 1, "slurm_runs": ["a"]}\n')
    assert start(tmp_path, path)
    # What a run left for the next one stays.
    signed = json.loads((tmp_path / LOCK).read_text())
    assert (signed["pid"], signed["slurm_runs"]) == (os.getpid(), ["a"])
    with (
        run_at_work(tmp_path),
        pytest.raises(ConfigError, match="made by another run, process 123 on a-host; wait for it"),
    ):
        start(tmp_path, path, may_replace=True)
    outcome = make(tmp_path / "o.tar", kind="outcome")
    with run_at_work(tmp_path), pytest.raises(ConfigError, match="made by another run"):
        land_outcome(outcome, read_index(outcome), tmp_path, may_replace=True)


def test_what_killed_openings_left_goes(tmp_path: Path) -> None:
    path = make(tmp_path / "b.tar")
    results = tmp_path / "results"
    for name in (".e.123.partial", ".e.other.123.partial", "e"):
        (results / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds results; move it away"):
        start(tmp_path, path)
    assert start(tmp_path, path, may_replace=True)
    assert sorted(p.name for p in results.iterdir()) == [".e.other.123.partial", "e"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "b.tar", {**ITEMS, "results/e/" + "d/" * 400 + "x": b""})
    deep = tmp_path.joinpath(*["a" * 200] * 17)
    with pytest.raises(HardwareError, match=r"cannot be written \(File name too long\)"):
        start(deep, path)
    assert [p.name for p in tmp_path.iterdir()] == ["b.tar"]


def test_weights_that_went_away_are_linked_again(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "model.safetensors").write_text("weights")
    sha256 = sha256_json([sha256_file(here / "model.safetensors")])
    items = {name: content for name, content in ITEMS.items() if "base_model" not in name}
    record = model_record(name=str(here), kind="local", weights_sha256=sha256)
    items |= {"results/e/model.json": record, "results/e/base_model/tokenizer.json": b"{}"}
    path = make(tmp_path / "b.tar", items)
    assert start(tmp_path, path)
    there = shutil.move(here, tmp_path / "there")
    assert not start(tmp_path, path, model=there)
    link = tmp_path / "results" / "e" / "base_model" / "model.safetensors"
    assert link.resolve() == there / "model.safetensors"


def test_an_outcome_needs_an_opened_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="results/e: no bundle was opened here"):
        pack_outcome("e")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "snapshot"
    place.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (place / name).write_text(name)
    return place


def model(folder: Path, **changes: Any) -> ModelRecord:
    settings = {"name": "maker/model", "kind": "hub", "revision": "abc"}
    record = folder.with_name("model.json")
    record.write_bytes(
        model_record(**{**settings, "weights_sha256": hash_weights(folder), **changes})
    )
    return read_record(ModelRecord, record)


def test_a_hub_model_has_its_commit_or_ends_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if len(asked) > 1:
            raise OSError("no network")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "laid out").mkdir()
    for _ in range(2):
        link_weights(model(folder), None, tmp_path / "laid out")
    assert asked == [("maker/model", "abc")], "what is there already is not asked for"
    assert hash_weights(tmp_path / "laid out") == hash_weights(folder)
    assert not (tmp_path / "laid out" / "consolidated.safetensors").exists()
    with pytest.raises(DataError, match=r"nor to be had from the hub .* give a folder"):
        link_weights(model(folder), None, folder.parent)
    with pytest.raises(TrainingError, match="no such folder on this machine"):
        link_weights(model(folder, kind="local", name="/nowhere"), None, folder.parent)
