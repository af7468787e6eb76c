"""What the guard copies at its end: everything that would be lost, the ledger first."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from stores import Place
from support import wait_for

from expertflow.core.errors import ConfigError
from expertflow.core.records import write_record, write_sealed
from expertflow.rental.guard import copies as guard_copies
from expertflow.rental.guard.copies import RESERVE_S, Copies
from expertflow.rental.guard.ledger import Ledger, PaidSession, read_ledger
from expertflow.rental.guard.options import parse_options
from expertflow.rental.sync.store import SendRecord, SyncFailed
from expertflow.train.saved import checkpoint_files


def copies_of(folder: Path, place: Place, *more: str, forget_spent: bool = False) -> Copies:
    words = ["--state", str(folder / "state"), "--results", str(folder / "results")]
    words += ["--sync-to", place.destination, *more, "--", "true"]
    copies = Copies(parse_options(words, None))
    copies.start_session(forget_spent=forget_spent)
    return copies


def finished(state: Path, weights: str) -> None:
    (state / "final").mkdir(parents=True)
    (state / "final" / "model.safetensors").write_text(weights)
    write_sealed(state / "outcome.json", {"summary": {"weights_sha256": weights}, "files": {}})


def unfinished(state: Path, *, save_s: float = 0.0) -> None:
    folder = state / "checkpoints" / "step-00000040"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_text("half")
    ours = checkpoint_files.hash_contents(folder, ["weights.safetensors"])
    progress = {checkpoint_files.OURS: ours, "save_points": [{"save_s": save_s}]}
    (folder / "progress.json").write_text(json.dumps(progress))


def publish(results: Path, weights: str) -> None:
    results.mkdir(parents=True)
    (results / "training.json").write_text(json.dumps({"weights_sha256": weights}))


def spend(folder: Path, start_s: float) -> PaidSession:
    session = PaidSession(start_s=start_s, end_s=start_s + 10, usd_per_hour=1.0)
    path = folder / "state" / ".guard" / "ledger.json"
    write_record(path, Ledger(sessions=(*read_ledger(path).sessions, session)))
    return session


def fail_at(copies: Copies, part: str, error: Exception | None = None) -> None:
    """Make the store fail for keys that contain a text."""
    store: Any = copies.push_store
    send = store.send_files

    def failing(folder: Path, key: str, names: list[str]) -> object:
        if part in f"{key}/{names[0]}":
            raise error or SyncFailed(f"{key}: the line is dead")
        return send(folder, key, names)

    store.send_files = failing


def sessions_there(place: Place, folder: Path) -> tuple[PaidSession, ...]:
    place.open().fetch("state/.guard/ledger.json", folder / "back")
    return read_ledger(folder / "back" / "ledger.json").sessions


def test_missing_results_or_a_failing_disk_are_failed_copies(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = copies_of(tmp_path, place)
    for _ in range(2):
        assert not copies.send_all()
        assert "to copy; set --results and --state" in copies.failures[-1]
        (tmp_path / "results").mkdir(exist_ok=True)
    publish(tmp_path / "results" / "x", "weights of x")
    copies = copies_of(tmp_path, place)
    fail_at(copies, "results", OSError("no answer"))
    assert not copies.send_with_retries(n_retries=0, may_go_on=lambda _: True)
    assert "no answer" in copies.failures[-1]
    waits: list[float] = []
    monkeypatch.setattr(copies.cancel, "wait", waits.append)
    assert not copies.send_with_retries(n_retries=7, may_go_on=lambda _: True)
    assert waits == [5, 10, 20, 40, 80, 80, 80]


def test_a_failing_state_delays_nothing(place: Place, tmp_path: Path) -> None:
    publish(tmp_path / "results" / "x", "weights of x")
    for name in ("a", "b"):
        unfinished(tmp_path / "state" / name / "f")
    # Also in the results, but another machine pulls only states, and does not train it again.
    finished(tmp_path / "state" / "x" / "f", "weights of x")
    spend(tmp_path, 0.0)
    copies = copies_of(tmp_path, place)
    fail_at(copies, "state/a")
    assert not copies.send_all()
    assert [line for line in copies.failures if "the line is dead" in line] == copies.failures
    store = place.open()
    assert "step-00000040.json" in store.list_names("state/b/f")
    assert "finished.json" in store.list_names("state/x/f")
    assert "ledger.json" in store.list_names("state/.guard")
    assert store.list_names("results") == ["x"]


def test_a_failed_push_does_not_end_training(place: Place, tmp_path: Path) -> None:
    unfinished(tmp_path / "state" / "a" / "f")
    copies = copies_of(tmp_path, place, "--push", place.destination)
    session = spend(tmp_path, 0.0)
    fail_at(copies, "state/a", RuntimeError("unheard of"))
    copies.push_soon()
    assert copies._pushing is not None
    wait_for(copies._pushing.done, message="the push did not end")
    assert "unheard of" in copies.failures[-1]
    # The ledger goes first.
    assert sessions_there(place, tmp_path) == (session,)


def test_two_machines_keep_each_others_dollars(place: Place, tmp_path: Path) -> None:
    one, two = (copies_of(tmp_path / name, place) for name in ("one", "two"))
    sessions = (spend(tmp_path / "one", 0.0), spend(tmp_path / "two", 100.0))
    # An earlier, shorter note of the same session.
    write_record(
        tmp_path / "two/state/.guard/ledger.json",
        Ledger(sessions=(replace(sessions[0], end_s=5.0), sessions[1])),
    )
    one.send_ledger()
    two.send_ledger()
    one.send_ledger()
    assert copies_of(tmp_path / "three", place).own.is_dir()
    assert read_ledger(tmp_path / "three" / "state/.guard/ledger.json").sessions == sessions
    # A reset budget is reset there, too.
    copies = copies_of(tmp_path / "three", place, forget_spent=True)
    session = spend(tmp_path / "three", 200.0)
    copies.send_ledger()
    assert sessions_there(place, tmp_path) == (session,)
    assert [path.name for path in copies.own.iterdir()] == ["ledger.json"]


def test_amounts_clipped_by_a_meter_do_not_return(place: Place, tmp_path: Path) -> None:
    spend(tmp_path, 0.0)
    copies_of(tmp_path, place).send_ledger()
    copies = copies_of(tmp_path, place)
    clipped = PaidSession(start_s=0.0, end_s=5.0, usd_per_hour=1.0)
    write_record(tmp_path / "state/.guard/ledger.json", Ledger(sessions=(clipped,)))
    copies.send_ledger()
    assert sessions_there(place, tmp_path) == (clipped,)


def test_the_reserve_grows_with_the_bytes_to_send(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "results" / "a", "weights of a")
    copies = copies_of(tmp_path, place)
    assert copies.reserve_s() == RESERVE_S
    unfinished(tmp_path / "state" / "a" / "f", save_s=40.0)
    n_unsent = sum(path.stat().st_size for path in tmp_path.rglob("*.*") if path.is_file())
    sent = {"what": "x", "n_files": 1, "duration_s": 100.0, "verified": "equal"}
    # No speed was measured yet.
    monkeypatch.setattr(guard_copies, "UNMEASURED_BYTES_PER_S", n_unsent / 50)
    assert copies.reserve_s() == pytest.approx(1.5 * 90)
    copies.pushes.append(SendRecord(n_bytes=n_unsent, **sent))
    assert copies.reserve_s() == pytest.approx(1.5 * 140)
    # A state has nothing left to save or send once its model was sent.
    sent["what"] = "state/a/f/finished"
    copies.pushes.append(SendRecord(n_bytes=n_unsent, **sent))
    assert copies.reserve_s() < 1.5 * 100


def test_base_weights_from_elsewhere_are_not_copied(place: Place, tmp_path: Path) -> None:
    base = tmp_path / "results" / "a" / "base_model"
    publish(base.parent, "weights of a")
    base.mkdir()
    (base / "config.json").touch()
    (base / "model.safetensors").symlink_to(base.parent / "training.json")
    assert copies_of(tmp_path, place).send_all()
    assert place.open().list_names("results/a/base_model") == ["config.json"]


def test_an_unreadable_place_starts_nothing(place: Place, tmp_path: Path) -> None:
    ledger = Path(place.destination, "state/.guard/ledger.json")
    ledger.mkdir(parents=True)
    (ledger / "x").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="nothing was started"):
        copies_of(tmp_path, place)
