"""The stop command runs when all is verified, and on no other day."""

import re
import signal
from pathlib import Path

import pytest
from guarded import HOOK, end, record, run, run_line, start_trainer
from stores import Place, every_kind
from support import patched_script

from expertflow.rental.guard.run import N_HOOKS

pytestmark = pytest.mark.long


@every_kind
def test_results_are_verified_before_the_machine_is_stopped(place: Place, tmp_path: Path) -> None:
    price = ("--usd-per-hour", "2.49")
    work = "mkdir -p results/sums; echo trained > results/sums/report.json"
    code, out = run_line(tmp_path, *price, "--sync-to", place.destination, *HOOK, line=work)
    assert code == 0, out
    assert place.read("results/sums/report.json") == b"trained\n"
    *outcome, usd = (tmp_path / "hook").read_text().split()
    assert outcome == ["finished", "0"] and 0 < float(usd) < 1
    found = record(tmp_path)
    assert found["on_finish"] == "run, exit code 0" and found["failures"] == []
    (sync,) = found["syncs"]
    assert sync["n_files"] == 1 and sync["n_bytes"] == 8
    assert re.search("equal|nothing differs", sync["verified"])
    # The record is there, too, as it was before the command ran.
    assert b'"outcome": "finished"' in place.read("results/guard.json")


def test_a_failed_command_is_stopped_too(tmp_path: Path) -> None:
    work = "mkdir -p results/base_model; touch results/base_model/w; echo half > results/log"
    options = ("--sync-to", "there", "--skip", "base_model", *HOOK)
    code, out = run_line(tmp_path, *options, line=f"{work}; exit 3")
    assert code == 3 and "dollars unknown" in out, out
    assert (tmp_path / "hook").read_text() == "failed 3 \n"
    found = record(tmp_path)
    assert found["usd"] is None and found["unavailable"]["usd"] == "no --usd-per-hour"
    there = tmp_path / "there" / "results"
    assert (there / "log").read_text() == "half\n" and not (there / "base_model").exists()


def test_a_failed_sync_keeps_the_machine(tmp_path: Path) -> None:
    # The place takes files when the run begins and is gone when it ends.
    gone, once = "mkdir results; echo x > results/x; rm -r there; touch there", "--sync-retries=0"
    code, out = run_line(tmp_path, "--sync-to", "there", once, *HOOK, line=gone)
    assert code == 84 and "NOT SYNCED" in out, out
    assert not (tmp_path / "hook").exists()
    found = record(tmp_path)
    assert found["on_finish"].startswith("not run: the results are not known")
    assert len(found["failures"]) == 1 and found["outcome"] == "finished"


def test_a_place_that_takes_nothing_is_found_before_anything_is_paid_for(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    code, out = run(tmp_path, "--sync-to", "there", *HOOK, command=["touch", "worked"])
    assert code == 1 and "nothing was started" in out and out.count("\n") == 1
    assert not (tmp_path / "worked").exists()


def test_a_run_that_was_stopped_by_hand_keeps_its_machine(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "log").touch()
    guard = start_trainer(tmp_path, "--sync-to", "there", *HOOK)
    guard.send_signal(signal.SIGINT)
    code, out = end(guard)
    assert code == 130, out
    assert not (tmp_path / "hook").exists()
    assert record(tmp_path)["on_finish"] == "not run after a signal"


@pytest.mark.parametrize(
    ("more", "n_tries", "said"),
    [
        ("", N_HOOKS, "failed 3 times, exit code 9"),
        ("kill -INT $PPID;", 1, "failed, exit code 9; not tried again, as a signal came"),
    ],
)
def test_a_stop_command_that_fails_is_told_loudly(
    tmp_path: Path, more: str, n_tries: int, said: str
) -> None:
    at_once = "from expertflow.rental.guard import run\nrun.HOOK_WAIT_S = 0.0"
    program = patched_script(tmp_path, "guard_run", at_once)
    hook = ("--on-finish", f"echo x >> tries; {more} exit 9", "--without-sync")
    code, out = run(tmp_path, *hook, command=["true"], program=program)
    assert code == 85 and "NOT STOPPED" in out, out
    assert (tmp_path / "tries").read_text() == "x\n" * n_tries
    assert record(tmp_path)["on_finish"] == said


def test_secrets_are_not_told(tmp_path: Path) -> None:
    hook = ("--on-finish", "true TOKEN123", "--without-sync")
    code, out = run(tmp_path, *hook, command=["true", "TOKEN456"])
    assert code == 0, out
    code, refused = run(tmp_path, "--push", "rsync://me:TOKEN789@localhost:1/x", command=["true"])
    assert code == 1 and "rsync://localhost:1/x" in refused
    written = tmp_path / "results" / "guard.json"
    text = out + refused + (written.read_text() if written.is_file() else "")
    assert "TOKEN" not in text
