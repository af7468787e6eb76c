"""The weights of a base model that a bundle names but does not hold."""

from pathlib import Path
from typing import Any

import pytest
from crafted_bundles import model_record

from expertflow.core.errors import DataError, TrainingError
from expertflow.core.records import read_record
from expertflow.rental.bundle.unpack import link_weights
from expertflow.train.model.base import hash_weights
from expertflow.train.records import ModelRecord


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


def test_a_hub_model_is_asked_for_by_its_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "laid out").mkdir()
    for _ in range(2):
        link_weights(model(folder), None, tmp_path / "laid out")
    assert asked == [("maker/model", "abc")], "what is there already is not asked for"
    assert hash_weights(tmp_path / "laid out") == hash_weights(folder)
    assert not (tmp_path / "laid out" / "consolidated.safetensors").exists()


def test_a_model_that_is_nowhere_ends_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(TrainingError, match=r"nor to be had from the hub .* give a folder"):
        link_weights(model(folder), None, folder.parent)
    with pytest.raises(TrainingError, match="no such folder on this machine"):
        link_weights(model(folder, kind="local", name="/nowhere"), None, folder.parent)


def test_a_given_folder_has_to_hold_the_same_weights(folder: Path, tmp_path: Path) -> None:
    wanted, there = model(folder), tmp_path / "there"
    there.mkdir()
    link_weights(wanted, folder, there)
    assert len(list(there.iterdir())) == 2
    (folder / "model-2.safetensors").write_text("others")
    with pytest.raises(DataError, match="its weights are not those of the bundle"):
        link_weights(wanted, folder, there)
    with pytest.raises(TrainingError, match=r"no \*\.safetensors"):
        link_weights(wanted, tmp_path, there)
