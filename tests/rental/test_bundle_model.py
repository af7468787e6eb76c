"""The weights of a base model that a bundle names but does not hold."""

from pathlib import Path
from typing import Any

import pytest

from expertflow.core.errors import DataError, TrainingError
from expertflow.rental.bundle.model import find_weights, lay_out_weights
from expertflow.rental.bundle.records import ModelToFetch
from expertflow.train.model.base import hash_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "snapshot"
    place.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (place / name).write_text(name)
    return place


def model(folder: Path, **changes: Any) -> ModelToFetch:
    settings: dict[str, Any] = {"name": "maker/model", "kind": "hub", "revision": "abc"}
    settings |= {"weights_sha256": hash_weights(folder), "n_weight_bytes": 0, **changes}
    return ModelToFetch(**settings)


def test_a_hub_model_is_asked_for_by_its_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = find_weights(model(folder), None)
    assert asked == [("maker/model", "abc")]
    lay_out_weights(files, tmp_path / "laid out")
    assert hash_weights(tmp_path / "laid out") == hash_weights(folder)
    assert not (tmp_path / "laid out" / "consolidated.safetensors").exists()


def test_a_model_that_is_nowhere_ends_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(TrainingError, match=r"neither in this box's cache .* give a folder"):
        find_weights(model(folder), None)
    with pytest.raises(TrainingError, match="no such folder on this box"):
        find_weights(model(folder, kind="local", name="/nowhere"), None)


def test_a_given_folder_has_to_hold_the_same_weights(folder: Path, tmp_path: Path) -> None:
    wanted = model(folder)
    assert len(find_weights(wanted, folder)) == 2
    (folder / "model-2.safetensors").write_text("others")
    with pytest.raises(DataError, match="its weights are not those of the bundle"):
        find_weights(wanted, folder)
    with pytest.raises(TrainingError, match=r"no \*\.safetensors"):
        find_weights(wanted, tmp_path)
