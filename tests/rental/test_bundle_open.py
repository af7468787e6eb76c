"""Opening a bundle beside runs, after openings that were killed, and where weights went away."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.rental.bundle.open import Opening, open_bundle
from expertflow.rental.bundle.outcome import land_outcome
from expertflow.rental.bundle.records import BundleIndex, ModelToFetch
from expertflow.rental.bundle.tar import Item, describe, read_index, write_bundle

LOCK = Path(".snakemake", "expertflow", "e.lock")
ITEMS = {
    "results/e/.bundle/provenance.json": Item(content=b"{}"),
    "results/e/base_model/tokenizer.json": Item(content=b"{}"),
    "results/e/plan.json": Item(content=b"{}"),
}


def bundle(folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"format": 1, "kind": "bundle", "expert": "e", "git": None}
    index = BundleIndex(**{**settings, "code": {}, "members": describe(ITEMS), **changes})
    write_bundle(folder / "b.tar", index, ITEMS)
    return folder / "b.tar"


def start(folder: Path, path: Path, **changes: Any) -> bool:
    """Open a bundle; tell whether it was laid out anew."""
    settings: dict[str, Any] = {"model": None, "replace": False, "settings_here": None}
    settings |= {"other_code": (), "accept_other_code": False, **changes}
    opening = Opening(bundle=path, index=read_index(path), directory=folder, **settings)
    return open_bundle(opening) is not None


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
    path = bundle(tmp_path)
    assert start(tmp_path, path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    with (
        run_at_work(tmp_path),
        pytest.raises(ConfigError, match="made by another run, process 123 on a-host; wait for it"),
    ):
        start(tmp_path, path, replace=True)
    outcome = bundle(tmp_path, kind="outcome")
    with run_at_work(tmp_path), pytest.raises(ConfigError, match="made by another run"):
        land_outcome(outcome, read_index(outcome), tmp_path, replace=True)


def test_what_a_run_left_for_the_next_one_stays(tmp_path: Path) -> None:
    (tmp_path / LOCK).parent.mkdir(parents=True)
    (tmp_path / LOCK).write_text('{"host": "h", "pid": 1, "slurm_runs": ["a"]}\n')
    assert start(tmp_path, bundle(tmp_path))
    assert json.loads((tmp_path / LOCK).read_text())["slurm_runs"] == ["a"]


def test_results_that_a_killed_opening_moved_away_come_back(tmp_path: Path) -> None:
    path = bundle(tmp_path)
    old = tmp_path / "results" / ".e.123.partial.old"
    old.mkdir(parents=True)
    (old / "mine").touch()
    another = tmp_path / "results" / ".e.other.123.partial"
    another.mkdir()
    (tmp_path / "results" / ".e.124.partial").mkdir()
    with pytest.raises(ConfigError, match="holds results of its own"):
        start(tmp_path, path)
    assert (tmp_path / "results" / "e" / "mine").is_file()
    old.mkdir()
    assert start(tmp_path, path, replace=True)
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == [another.name, "e"]


def test_weights_that_went_away_are_linked_again(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "model.safetensors").write_text("weights")
    sha256 = sha256_json([sha256_file(here / "model.safetensors")])
    model = ModelToFetch(
        name=str(here), kind="local", revision=None, weights_sha256=sha256, n_weight_bytes=7
    )
    path = bundle(tmp_path, model=model)
    assert start(tmp_path, path)
    there = shutil.move(here, tmp_path / "there")
    assert not start(tmp_path, path, model=there)
    link = tmp_path / "results" / "e" / "base_model" / "model.safetensors"
    assert link.resolve() == there / "model.safetensors"
    (there / "model.safetensors").write_text("others!")
    with pytest.raises(DataError, match="its weights are not those of the bundle"):
        start(tmp_path, path, model=there)
    assert link.is_symlink()
