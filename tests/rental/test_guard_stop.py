"""Whatever tells a guarded run to stop, its trainer saves, and nothing of it is left running."""

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from guarded import end, n_starts, record, run, start_trainer, trainer, wait_for_line
from support import SCRIPTS, patched_script, running_in, wait_for

pytestmark = pytest.mark.long

SNAKEFILE = """
rule all:
    input:
        "out/model.txt",
        "out/after.txt",


rule train:
    output:
        "out/model.txt",
    log:
        "out/log.txt",
    retries: 3
    shell:
        "{trainer} 2> >(tee -i {{log:q}} >&2) && touch {{output}}"


rule after:
    output:
        "out/after.txt",
    shell:
        "sleep 0.1; touch {{output}}"
"""


def snakemake(folder: Path, *, save_s: float) -> list[str]:
    words = shlex.join(trainer(folder, save_s=save_s))
    (folder / "Snakefile").write_text(SNAKEFILE.format(trainer=words))
    program = str(Path(sys.executable).with_name("snakemake"))
    return [program, "--cores", "2", "--scheduler", "greedy", "--quiet", "all"]


def test_a_signal_reaches_the_trainer_below_snakemake(tmp_path: Path) -> None:
    guard = start_trainer(tmp_path, command=snakemake(tmp_path, save_s=0.5))
    guard.send_signal(signal.SIGINT)
    code, out = end(guard)
    assert code == 130, out
    # It saved, its pipe of logs did not end before it, and no retry began.
    assert (tmp_path / "saved.txt").is_file()
    assert n_starts(tmp_path) == 1
    assert running_in(tmp_path) == []
    assert not list(tmp_path.glob(".snakemake/locks/*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_trainer_without_snakemake_is_told_too(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "job.sh"
    work = f"{shlex.join(trainer(tmp_path))} 2> >(cat >&2)"
    script.write_text(f"{work}\necho went on >> went_on.txt\nsleep 60\n")
    guard = start_trainer(tmp_path, command=["bash", str(script)])
    guard.send_signal(number)
    code, out = end(guard)
    assert code == 128 + number, out
    assert record(tmp_path)["signals"] == [number.name]
    assert (tmp_path / "saved.txt").is_file()
    assert not (tmp_path / "went_on.txt").exists()
    assert running_in(tmp_path) == []


def guard_that_takes_for_one(folder: Path, echo_s: float) -> Path:
    """Return a guard that takes signals within some seconds for one."""
    code = f"from expertflow.rental.guard import run\nrun.ECHO_S = {echo_s}"
    return patched_script(folder, "guard_run", code)


def test_a_signal_that_is_repeated_kills(tmp_path: Path) -> None:
    program = guard_that_takes_for_one(tmp_path, echo_s=1e-9)
    guard = start_trainer(tmp_path, command=trainer(tmp_path, save_s=600), program=program)
    guard.terminate()
    wait_for_line(guard, "stopping")
    guard.terminate()
    code, out = end(guard)
    assert code == 143, out
    assert record(tmp_path)["exit_code"] == 137
    assert running_in(tmp_path) == []


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path: Path) -> None:
    # A busy machine is not too slow for two that come within a minute.
    program = guard_that_takes_for_one(tmp_path, echo_s=60.0)
    hold = tmp_path / "hold"
    hold.touch()
    guard = start_trainer(tmp_path, command=trainer(tmp_path), program=program)
    guard.send_signal(signal.SIGHUP)
    wait_for_line(guard, "stopping")
    guard.send_signal(signal.SIGHUP)
    hold.unlink()
    code, out = end(guard)
    assert code == 129, out
    assert (tmp_path / "saved.txt").is_file()


def test_a_signal_amid_a_stop_of_the_guards_own_kills_nothing(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    guard = start_trainer(
        tmp_path, "--notice-command", "test -e notice", "--notice-seconds", "60",
        command=trainer(tmp_path),
    )  # fmt: skip
    (tmp_path / "notice").touch()
    wait_for_line(guard, "stopping")
    guard.terminate()
    hold.unlink()
    code, out = end(guard)
    assert code == 83, out
    assert (tmp_path / "saved.txt").is_file()
    assert record(tmp_path)["signals"] == ["SIGTERM"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--grace-seconds", "0.2"), 143),
        (("--notice-command", "test -e notice", "--notice-seconds", "0.2"), 83),
    ],
)
def test_the_grace_ends_with_a_kill(
    tmp_path: Path, options: tuple[str, ...], expected: int
) -> None:
    guard = start_trainer(tmp_path, *options, command=trainer(tmp_path, save_s=600))
    if expected == 83:
        (tmp_path / "notice").touch()
    else:
        guard.terminate()
    code, out = end(guard)
    assert code == expected, out
    assert record(tmp_path)["exit_code"] == 137
    assert not (tmp_path / "saved.txt").exists()
    assert running_in(tmp_path) == []


def test_a_notice_stops_at_once(tmp_path: Path) -> None:
    options = ("--notice-command", "test -e notice", "--on-finish", "touch hook", "--without-sync")
    guard = start_trainer(tmp_path, *options, "--notice-seconds", "60")
    (tmp_path / "notice").touch()
    code, out = end(guard)
    assert code == 83, out
    assert (tmp_path / "saved.txt").is_file()
    assert record(tmp_path)["outcome"] == "notice"
    # The provider takes the machine; it is not ours to remove.
    assert not (tmp_path / "hook").exists()


def test_a_killed_guard_takes_its_command_along(tmp_path: Path) -> None:
    guard = start_trainer(tmp_path, command=snakemake(tmp_path, save_s=0.5))
    guard.kill()
    guard.wait()
    wait_for(lambda: not running_in(tmp_path), said="something went on without its guard")
    assert (tmp_path / "saved.txt").is_file()
    assert n_starts(tmp_path) == 1


def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    work = shlex.join(trainer(tmp_path, save_s=0.2))
    line = f"{work} & while [ ! -e starts.txt ]; do sleep 0.01; done"
    code, out = run(tmp_path, command=["bash", "-c", line])
    assert code == 0, out
    assert (tmp_path / "saved.txt").is_file()
    assert running_in(tmp_path) == []


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    assert run(tmp_path, command=["bash", "-c", "exit 7"])[0] == 7
    assert record(tmp_path)["outcome"] == "failed"
    assert run(tmp_path, command=["bash", "-c", "kill -9 $$"])[0] == 137
    code, out = run(tmp_path, command=["no-such-program"])
    assert code == 127 and "no-such-program: No such file" in out


def test_as_the_first_process_it_collects_orphans(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    probe = [unshare or "", "--pid", "--fork", "--mount-proc", "true"]
    if unshare is None or os.spawnv(os.P_WAIT, unshare, probe):
        pytest.skip("no PID namespaces here")
    # The orphan ends as nobody's child but the first process's. Collected, it is no process at all.
    orphan = (
        "(sleep 0.1 & echo $! > orphan.txt); for i in {1..9000}; do sleep 0.01;"
        " [ -e /proc/$(cat orphan.txt) ] || exit 9; done"
    )
    first = [unshare, *probe[1:-1], sys.executable, str(SCRIPTS / "guard_run.py")]
    first += ["--", "bash", "-c", orphan]
    code = os.spawnve(os.P_WAIT, "/usr/bin/env", ["env", "-C", str(tmp_path), *first], os.environ)
    assert code == 9
