"""However a guarded run is stopped, its trainer saves, and no process is left running."""

import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import guarded
import pytest
from support import ROOT, SCRIPTS, running_in, wait_for

sys.path.append(str(ROOT / "tests" / "hardware"))

import nvml_stub

from expertflow.rental.guard.ledger import read_ledger

pytestmark = pytest.mark.long


def test_the_exit_code_is_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder in PATH that this user may not read would cause another error.
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    guarded.run(tmp_path, line="exit 7", code=7)
    assert guarded.record(tmp_path)["outcome"] == "failed"
    guarded.run(tmp_path, line="kill -9 $$", code=137)
    out = guarded.run(tmp_path, command=["no-such-program"], code=127)
    assert "no-such-program: No such file" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_trainer_without_snakemake_is_signaled_too(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "job.sh"
    work = f"{shlex.join(guarded.trainer(tmp_path))} 2> >(cat >&2)"
    script.write_text(f"{work}\necho went on >> went_on.txt\nsleep 60\n")
    options = ("--without-sync", *guarded.HOOK)
    guard = guarded.start_trainer(tmp_path, *options, command=["bash", str(script)])
    guard.send_signal(number)
    guarded.end(guard, code=128 + number)
    found = guarded.record(tmp_path)
    assert (found["signals"], found["on_finish"]) == ([number.name], "not run after a signal")
    # A run that is stopped by hand keeps its machine.
    assert not (tmp_path / "hook").exists()
    assert (tmp_path / "saved.txt").is_file()
    assert not (tmp_path / "went_on.txt").exists()
    assert running_in(tmp_path) == []


def test_a_killed_guard_takes_its_command_along(tmp_path: Path) -> None:
    guard = guarded.start_trainer(tmp_path)
    guard.kill()
    guarded.end(guard, code=-9)
    wait_for(lambda: running_in(tmp_path) == [], message="something kept running without its guard")
    assert (tmp_path / "saved.txt").is_file()


# Even a busy machine manages two signals within a minute.
@pytest.mark.parametrize(("echo_s", "is_one"), [(1e-9, False), (60.0, True)])
def test_a_repeated_signal_kills_but_not_an_echo(
    tmp_path: Path, echo_s: float, is_one: bool
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    sooner = f"from expertflow.rental.guard import run\nrun.ECHO_S = {echo_s}"
    guard = guarded.start_trainer(tmp_path, patch=sooner)
    guard.send_signal(signal.SIGHUP)
    guarded.wait_for_line(guard, "stopping")
    guard.send_signal(signal.SIGHUP)
    if is_one:
        hold.unlink()
    guarded.end(guard, code=129)
    assert guarded.record(tmp_path)["exit_code"] == (143 if is_one else 137)
    assert (tmp_path / "saved.txt").is_file() is is_one
    assert running_in(tmp_path) == []


def test_a_signal_during_the_guards_own_stop_kills_nothing(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    options = ("--notice-command", "test -e notice", *guarded.HOOK, "--without-sync")
    guard = guarded.start_trainer(tmp_path, *options)
    (tmp_path / "notice").touch()
    guarded.wait_for_line(guard, "stopping")
    guard.terminate()
    hold.unlink()
    guarded.end(guard, code=83)
    assert (tmp_path / "saved.txt").is_file()
    found = guarded.record(tmp_path)
    assert (found["outcome"], found["signals"]) == ("notice", ["SIGTERM"])
    assert found["on_finish"] == "not run after a notice"
    # The provider takes the machine; it is not ours to remove.
    assert not (tmp_path / "hook").exists()


def test_a_grace_ends_with_a_kill(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    guard = guarded.start_trainer(tmp_path, "--grace-seconds", "0.2")
    guard.terminate()
    guarded.end(guard, code=143)
    assert guarded.record(tmp_path)["exit_code"] == 137
    assert not (tmp_path / "saved.txt").exists()
    assert running_in(tmp_path) == []


def test_idle_cards_end_a_run(tmp_path: Path) -> None:
    library = nvml_stub.build(tmp_path)
    env = nvml_stub.environment(library, nvml_stub.write(tmp_path, utilization=90))
    guard = guarded.start_trainer(tmp_path, "--idle-minutes", "0.01", env=env)
    nvml_stub.write(tmp_path, utilization=0)
    guarded.end(guard, code=81)
    assert (tmp_path / "saved.txt").is_file()
    found = guarded.record(tmp_path)
    assert found["outcome"] == "idle" and found["idle_timer"].startswith("on: 1 cards")


def test_a_standstill_ends_a_run(tmp_path: Path) -> None:
    guarded.run(tmp_path, "--stalled-minutes", "0.01", command=["sleep", "3600"], code=82)
    assert guarded.record(tmp_path)["outcome"] == "stalled"


def test_a_run_stops_before_its_budget_is_spent(tmp_path: Path) -> None:
    hook = (*guarded.BUDGET, *guarded.HOOK, "--without-sync")
    out = guarded.run(tmp_path, *hook, patch=guarded.AHEAD, code=80)
    assert (tmp_path / "hook").read_text().startswith("budget 80 1")
    assert (tmp_path / "saved.txt").is_file()
    found = guarded.record(tmp_path)
    assert found["outcome"] == "budget" and found["usd_before"] == 0
    # The record is written before the line is printed, and time in between is paid for.
    told = re.search(r"after \d+ s, \$([\d.]+) spent", out)
    assert told and 1000 <= found["usd"] <= float(told[1]) + 0.01
    # The next session finds it spent, and starts nothing.
    out = guarded.run(tmp_path, *guarded.BUDGET, command=["touch", "went_on"], code=1)
    assert "raise --max-usd, or start a new budget" in out and out.count("\n") == 1
    assert not (tmp_path / "went_on").exists()
    guarded.run(tmp_path, *guarded.BUDGET, "--forget-spent", command=["true"])
    assert guarded.record(tmp_path)["usd_before"] == 0


def test_a_machine_that_is_gone_has_left_its_cost(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "results").mkdir(parents=True)
        (tmp_path / name / "results" / "x").touch()
    # No checkpoints are pushed; at a dollar a second something is spent soon.
    options = ("--sync-to", str(tmp_path / "there"), "--usd-per-hour", "3600")
    ledger = tmp_path / "there" / "state" / ".guard" / "ledger.json"
    soon = "from expertflow.rental.guard import run\nrun.NOTE_EVERY_S = 0.1"
    guard = guarded.start_trainer(tmp_path / "one", *options, "--push-minutes", "0.001", patch=soon)

    def is_sent() -> bool:
        [session] = read_ledger(ledger).sessions
        return session.end_s - session.start_s > 1

    wait_for(is_sent, message="the ledger was not sent", during=guard)
    guard.kill()
    guarded.end(guard, code=-9)
    guarded.run(tmp_path / "two", *options, command=["true"])
    assert guarded.record(tmp_path / "two")["usd_before"] > 1


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_restarted_machine_stops_when_the_budget_is_spent(tmp_path: Path, is_fresh: bool) -> None:
    options = (*guarded.BUDGET, *guarded.HOOK, "--sync-to", str(tmp_path / "bucket"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "report.json").write_text("{}")
    guarded.run(tmp_path, *options, patch=guarded.AHEAD, code=80)
    again = tmp_path / "again" if is_fresh else tmp_path
    again.mkdir(exist_ok=True)
    (tmp_path / "hook").unlink()
    (tmp_path / "bucket/results/report.json").unlink()
    out = guarded.run(again, *options, command=["touch", "went_on"], code=80)
    assert "the command is not started: $" in out and "stop command run, exit code 0" in out
    assert (again / "hook").read_text().startswith("budget 80 1")
    assert not (again / "went_on").exists()
    # Files that are only here are copied before the machine is stopped.
    assert (tmp_path / "bucket/results/report.json").is_file() is not is_fresh
    found = guarded.record(again)
    assert found["exit_code"] is None and found["on_finish"] == "run, exit code 0"
    # After an earlier session, missing results cannot be assumed to be elsewhere.
    shutil.rmtree(again / "results")
    (again / "hook").unlink()
    out = guarded.run(again, *options, command=["true"], code=84)
    assert "NOT SYNCED" in out
    assert not (again / "hook").exists()


def test_as_the_first_process_it_collects_orphans(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    probe = [unshare or "", "--pid", "--fork", "--mount-proc", "true"]
    if unshare is None or os.spawnv(os.P_WAIT, unshare, probe):
        pytest.skip("no PID namespaces here")
    # The orphan becomes a child of the first process. Once collected, it no longer exists.
    orphan = (
        "(sleep 0.1 & echo $! > orphan.txt); for i in {1..9000}; do sleep 0.01;"
        " [ -e /proc/$(cat orphan.txt) ] || exit 9; done"
    )
    first = [unshare, *probe[1:-1], sys.executable, str(SCRIPTS / "guard_run.py")]
    first += ["--", "bash", "-c", orphan]
    code = os.spawnve(os.P_WAIT, "/usr/bin/env", ["env", "-C", str(tmp_path), *first], os.environ)
    assert code == 9


SNAKEFILE = """
rule train:
    output:
        "out/model.txt",
    log:
        "out/log.txt",
    retries: 3
    shell:
        "{trainer} 2> >(tee -i {{log:q}} >&2) && touch {{output}}"
"""


def test_a_signal_reaches_the_trainer_below_snakemake(tmp_path: Path) -> None:
    words = shlex.join(guarded.trainer(tmp_path))
    (tmp_path / "Snakefile").write_text(SNAKEFILE.format(trainer=words))
    program = str(Path(sys.executable).with_name("snakemake"))
    command = [program, "--cores", "2", "--scheduler", "greedy", "--quiet", "all"]
    guard = guarded.start_trainer(tmp_path, command=command)
    guard.send_signal(signal.SIGINT)
    guarded.end(guard, code=130)
    assert running_in(tmp_path) == [] == list(tmp_path.glob(".snakemake/locks/*"))
    # It saved, its log pipe did not end before it, and no retry started.
    assert (tmp_path / "saved.txt").is_file()
    assert (tmp_path / "starts.txt").read_text() == "started\n"
