"""What comes back is whole and further than what is here; a line that breaks is no damage."""

import fcntl
import logging
from pathlib import Path

import pytest
from pushed_states import KEY, Flaky, push, save, state
from stores import Place, place

from expertflow.rental.sync.states import N_FETCHES, pull_states
from expertflow.rental.sync.store import SyncFailed, files_below
from expertflow.train.saved import checkpoint_files

__all__ = ["place", "state"]

local = pytest.mark.parametrize("place", ["local"], indirect=True)


@local
def test_what_is_further_here_stays(place: Place, state: Path, tmp_path: Path) -> None:
    store = place.open()
    save(state, 20)
    push(state, store)
    save(state, 40)
    assert pull_states(tmp_path / "here", store) == []
    newest = checkpoint_files.newest(state)
    assert newest is not None and newest.name == "step-00000040"


@local
def test_a_state_in_use_is_left_alone(place: Place, state: Path, tmp_path: Path) -> None:
    store = place.open()
    save(state, 20)
    push(state, store)
    busy = tmp_path / "fresh" / "sums" / "abc"
    busy.mkdir(parents=True)
    with (busy / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        (said,) = pull_states(tmp_path / "fresh", store)
    assert said.endswith("left alone")
    assert files_below(busy) == ["lock"]


@local
def test_a_manifest_that_is_none_gives_way(place: Place, state: Path, tmp_path: Path) -> None:
    store = place.open()
    for step in (20, 40):
        save(state, step)
        push(state, store)
    place.write(f"{KEY}/step-00000040.json", b"{")
    (said,) = pull_states(tmp_path / "fresh", store)
    assert "step-00000020 pulled" in said


@local
def test_a_store_cannot_write_outside_the_state(
    place: Place, state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = place.open()
    save(state, 20)
    push(state, store)
    text = place.read(f"{KEY}/step-00000020.json").replace(b'"steps.jsonl"', b'"../steps.jsonl"')
    place.write(f"{KEY}/step-00000020.json", text)
    with caplog.at_level(logging.WARNING), pytest.raises(SyncFailed, match=r"damaged.*--no-pull"):
        pull_states(tmp_path / "fresh", store)
    assert "no name of a file" in caplog.text
    assert not (tmp_path / "fresh" / "sums" / "abc").exists()


@local
def test_a_line_that_breaks_is_no_damage(place: Place, state: Path, tmp_path: Path) -> None:
    store, fresh = place.open(), tmp_path / "fresh"
    for step in (20, 40):
        save(state, step)
        push(state, store)
    waits: list[float] = []
    with pytest.raises(SyncFailed, match="the line is dead"):
        pull_states(fresh, Flaky(store, 99), wait=waits.append)  # type: ignore[arg-type]
    assert len(waits) == N_FETCHES - 1 and not (fresh / "sums" / "abc").exists()
    (said,) = pull_states(fresh, Flaky(store, 2), wait=waits.append)  # type: ignore[arg-type]
    assert "step-00000040 pulled" in said


@local
def test_a_checkpoint_that_was_spoiled_here_is_brought_back(place: Place, state: Path) -> None:
    store = place.open()
    save(state, 20)
    push(state, store)
    weights = state / "checkpoints" / "step-00000020" / checkpoint_files.WEIGHTS
    good = weights.read_bytes()
    weights.write_bytes(bytes(len(good)))
    (said,) = pull_states(state.parents[1], store)
    assert "step-00000020 pulled" in said and weights.read_bytes() == good
