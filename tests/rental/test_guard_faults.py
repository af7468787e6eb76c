"""Faults in a guarded run, its end or its options cost no work or money."""

import errno
import os
import shlex
import subprocess
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import guarded
import pytest
from support import running_in, wait_for

from expertflow.core.errors import ConfigError
from expertflow.rental.guard.options import check_programs, guard_command, parse_options
from expertflow.rental.guard.run import N_HOOKS, NOT_STARTED, TIMED_OUT, run_hook
from expertflow.rental.guard.timers import Notice

# A guard in which something breaks as soon as the trainer works; opening cards breaks at once.
BROKEN = """
from expertflow.rental.guard import supervisor, timers

def odd(*_):
    if Path("starts.txt").is_file() or timers.open_gpus is odd:
        raise RuntimeError("unheard of")

{place} = odd
"""
long = pytest.mark.long
LATER = (datetime.now(UTC) + timedelta(days=1)).isoformat()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(*options: str) -> Namespace:
    return parse_options([*options, "--", "true"], None)


@long
def test_a_second_guard_in_a_folder_is_rejected(tmp_path: Path) -> None:
    options = ("--sync-to", str(tmp_path / "there"), *guarded.HOOK)
    first = guarded.start_trainer(tmp_path, *options)
    hold = tmp_path / "state" / ".guard" / "hold"
    hold.mkdir()
    out = guarded.run(tmp_path, *options, command=["false"], code=1)
    assert "another guard" in out and out.count("\n") == 1
    assert first.poll() is None and hold.is_dir() and not (tmp_path / "hook").exists()
    first.terminate()
    guarded.end(first, code=84)
    # Its lock ends with its process.
    guarded.run(tmp_path, command=["true"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--max-usd", "4"), "--max-usd needs --usd-per-hour"),
        (("--usd-per-hour", "1", "--paid-since", LATER), "is in the future by this machine's"),
        (("--paid-since", "2016-01-31"), "is over a year ago by this machine's clock, 20"),
        (("--paid-since", "9999-12-31T23:59:59-12:00"), "is not a time; write it as"),
        (("--on-finish", "stop"), "add --sync-to DEST, or --without-sync if the disk is kept"),
        (("--without-sync", "--on-finish", ""), "--on-finish is empty; pass a command"),
        (("--notice-command", " "), "--notice-command is empty; pass a command"),
        (("--push", "s3:///x"), "use a path, host:path"),
    ],
)
def test_contradictory_settings_are_rejected(options: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(*options)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--usd-per-hour", "2,49", "'2,49' is not a number; write it as 2.49"),
        ("--idle-minutes", "-1", "-1 is not 0 or more"),
        ("--max-usd", "0", "0 is not above 0"),
    ],
)
def test_a_value_that_is_not_a_number_is_named(
    option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings(option, value)
    assert f"argument {option}: {problem}" in capsys.readouterr().err


def test_a_missing_stop_command_is_rejected_before_the_run() -> None:
    for line in ("cd / && stop", "if true; then stop; fi", "A=1 stop", '"$X/stop" x', "/bin/sh x"):
        check_programs(settings("--without-sync", "--on-finish", line, "--notice-command", line))
    for option, program in (("--on-finish", "no-such-stop"), ("--notice-command", "/no/such")):
        with pytest.raises(ConfigError, match=f"{option}: there is no '{program}' here"):
            check_programs(settings("--without-sync", option, f" {program} pod 7"))


@pytest.mark.parametrize("words", [["-d", "run1"], ["--directory=run1"]])
def test_a_snakemake_in_another_folder_is_rejected(words: list[str]) -> None:
    command = ["/opt/bin/snakemake", "all", *words]
    with pytest.raises(ConfigError, match="--results and --state"):
        parse_options(["--", *command], None)
    parse_options(["--results", "run1/results", "--state", "run1/state", "--", *command], None)
    parse_options(["--", "tool", "-d", "x"], None)


@pytest.mark.parametrize("option", ["--sync-to", "--push"])
@pytest.mark.parametrize(("folder", "other"), [("results", "state"), ("state", "results")])
def test_a_copy_on_the_same_disk_does_not_count(
    here: Path, option: str, folder: str, other: str
) -> None:
    # The other one is elsewhere.
    there = ("--sync-to", "s3://b/x", f"--{other}", "/proc", option, "bucket/run1")
    problem = f"on the disk of {folder}.* --disk-stays if the disk is kept"
    with pytest.raises(ConfigError, match=problem):
        settings(*there, "--on-finish", "stop")
    settings(*there)
    settings(*there, "--on-finish", "stop", "--disk-stays")


def test_nothing_is_copied_into_itself(here: Path) -> None:
    (here / "results").mkdir()
    (here / "link").symlink_to(here)
    for place in (".", "link", "../" + here.name, "results/copy", "state", str(here)):
        for option in ("--push", "--sync-to"):
            with pytest.raises(ConfigError, match=f"{option} .* would be copied into itself"):
                settings(option, place)
    settings("--push", "copy", "--sync-to", "results-copy")


def test_a_tilde_is_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    places = ("--push=~/x", "--sync-to=~/y", "--results=~/z", "--state=~/s")
    found = settings(*places, "--on-finish", "stop", "--disk-stays")
    assert [found.push, found.sync_to] == [str(here / "x"), str(here / "y")]
    assert [found.results, found.state] == [here / "z", here / "s"]
    # The remote shell expands its own.
    assert settings("--push=host:~/x").push == "host:~/x"


@long
def test_an_unwritable_ledger_does_not_hold_back_results(tmp_path: Path) -> None:
    work = "mkdir results; echo x > results/x; rm -r state/.guard; touch state/.guard"
    options = ("--sync-to", str(tmp_path / "there"), *guarded.HOOK)
    price = ("--usd-per-hour", "1", "--max-usd", "5")
    out = guarded.run(tmp_path, *price, *options, line=work, patch=guarded.AT_ONCE, code=84)
    assert "the ledger could not be written" in out
    assert (tmp_path / "there" / "results" / "x").read_text() == "x\n"
    assert not (tmp_path / "hook").exists()


@long
def test_a_spent_budget_does_not_end_the_tries_of_the_stop_command(tmp_path: Path) -> None:
    sooner = "\nfrom expertflow.rental.guard import copies\ncopies.FIRST_WAIT_S = 0.5\n"
    there = tmp_path / "there"
    script = "mkdir results; echo x > results/x; rm -r there; touch there starts.txt; sleep 600"
    options = (*guarded.BUDGET, "--sync-to", str(there), *guarded.HOOK)
    guard = guarded.start(tmp_path, *options, line=script, patch=guarded.AHEAD + sooner)
    guarded.wait_for_line(guard, "trying again")
    there.unlink()
    out = guarded.end(guard, code=80)
    assert (tmp_path / "hook").is_file(), out


# A copy of the ledger fails unexpectedly; states are pulled until the budget is spent.
ODD_LEDGER = """
import time
from expertflow.rental.guard import copies
from expertflow.rental.guard.ledger import Meter
from expertflow.rental.sync.stores import LocalStore

def wait(self):
    if not self.cancel.wait(600):
        raise SystemExit("the pull was not ended")
    Meter.__init__.__kwdefaults__["clock"], odd.cancel = None, self.cancel
    raise KeyError("odd pull")

send = LocalStore.send_files

def odd(store, folder, key, names):
    if hasattr(odd, "cancel"):
        LocalStore.send_files = send
        raise ValueError("broken off" if odd.cancel.is_set() else "unheard of")
    return send(store, folder, key, names)

copies.Copies.pull_states, LocalStore.send_files = wait, odd
ahead = lambda: time.monotonic() + 1000 * (Meter.__init__.__kwdefaults__["clock"] is None)
Meter.__init__.__kwdefaults__["clock"] = ahead
"""


@long
def test_no_error_at_the_end_of_a_pull_keeps_the_machine(tmp_path: Path) -> None:
    # At a dollar per second, half a second is left for the pull.
    price = ("--usd-per-hour", "3600", "--max-usd", "60.5")
    options = (*price, "--push", "there", *guarded.HOOK, "--without-sync")
    out = guarded.run(tmp_path, *options, command=["touch", "worked"], patch=ODD_LEDGER, code=80)
    failure = "state/.guard/ledger.json: not sent: ValueError: unheard of"
    assert (tmp_path / "hook").is_file() and f"push: {failure}" in out, out
    assert "KeyError: 'odd pull'" in out
    assert not (tmp_path / "worked").exists() and "the command is not started" in out
    assert f"push: {failure}" in guarded.record(tmp_path)["failures"]


@long
@pytest.mark.parametrize(
    "place", ["timers.Standstill.poll", "timers.open_gpus", "supervisor.Supervisor.poll"]
)
def test_a_failing_guard_saves_and_copies_first(tmp_path: Path, place: str) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x").touch()
    options = ("--idle-minutes", "5", "--sync-to", str(tmp_path / "there"), *guarded.HOOK)
    out = guarded.run(tmp_path, *options, patch=BROKEN.format(place=place), code=1)
    assert "unheard of" in out, out
    # Cards are opened before the trainer has anything to save.
    assert (tmp_path / "saved.txt").is_file() or place == "timers.open_gpus"
    assert (tmp_path / "hook").is_file() and (tmp_path / "there" / "results" / "x").is_file()
    assert guarded.record(tmp_path)["why"].startswith("the guard itself failed")


def test_a_stop_command_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", full)
    assert run_hook("true", {}) == NOT_STARTED


def is_alone(folder: Path) -> bool:
    return all(process.pid == os.getpid() for process in running_in(folder))


def test_a_stop_command_that_hangs_has_failed(here: Path) -> None:
    assert run_hook("sleep 600 & wait", {}, limit_s=0.2) == TIMED_OUT
    wait_for(lambda: is_alone(here), message="the stop command's child is still running")


def test_no_notice_command_leaves_children_behind(here: Path) -> None:
    notice = Notice("sleep 600 & wait")
    notice.poll()
    wait_for(lambda: len(running_in(here)) > 2, message="the notice command did not start")
    notice.close()
    wait_for(lambda: is_alone(here), message="its child is still running")


def test_each_experts_copies_have_their_own_place() -> None:
    def options(text: str) -> list[str]:
        words = shlex.split(guard_command(text, "an expert"))
        assert words[0] == "python" and words[-1] == "--"
        return words[2:-1]

    found = options("--push s3://b/c/ --push-minutes 5 --sync-to=/a/b --max-usd 2")
    assert found[:4] == ["--push", "s3://b/c/an expert", "--push-minutes", "5"]
    assert found[4:] == ["--sync-to=/a/b/an expert", "--max-usd", "2"]
    wanted = ["--sync-t", "a b/an expert", "--push=c/an expert"]
    assert options("--sync-t 'a b' --push=c") == wanted
    assert guard_command("", "an expert") == ""


STOPS = "--on-finish would stop the machine before the outcome"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--on-finish stop", STOPS),
        ("--push a --on-finish=stop", STOPS),
        ("--on-fin stop", STOPS),
        ("--push 'a", "is not valid shell syntax"),
    ],
)
def test_impossible_options_of_a_job_end_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        guard_command(text, "e")


@long
def test_a_failed_command_is_stopped_too(tmp_path: Path) -> None:
    options = ("--sync-to", "there", *guarded.HOOK)
    work = "mkdir results; echo half > results/log; exit 3"
    # A launcher may ignore ended children, and with them their exit codes.
    ignoring = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    out = guarded.run(tmp_path, *options, line=work, patch=ignoring, code=3)
    assert "dollars unknown" in out, out
    assert (tmp_path / "hook").read_text() == "failed 3 \n"
    found = guarded.record(tmp_path)
    assert found["usd"] is None and found["unavailable"]["usd"] == "no --usd-per-hour"
    there = tmp_path / "there" / "results"
    assert (there / "log").read_text() == "half\n"
    # The record exists, too, as it did before the command ran.
    assert '"outcome": "failed"' in (there / "guard.json").read_text()
    (sync,) = found["syncs"]
    assert (sync["n_files"], sync["n_bytes"]) == (1, 5) and "matches" in sync["verified"]
    assert found["on_finish"] == "run, exit code 0" and found["failures"] == []


# Copies of results fail this many times, unexpectedly.
ODD = (
    guarded.AT_ONCE
    + """
from expertflow.rental.sync.stores import LocalStore

send, left = LocalStore.send_files, {n_times}

def odd(store, folder, key, names):
    global left
    if key == "results" and left:
        left -= 1
        raise ValueError("unheard of")
    return send(store, folder, key, names)

LocalStore.send_files = odd
"""
)


@long
@pytest.mark.parametrize(("n_times", "exit_code"), [(9, 0), (99, 84)])
def test_no_error_in_a_copy_ends_the_guard(tmp_path: Path, n_times: int, exit_code: int) -> None:
    options = ("--sync-to", "there", *guarded.HOOK)
    work, odd = "mkdir results; echo x > results/x", ODD.format(n_times=n_times)
    out = guarded.run(tmp_path, *options, line=work, patch=odd, code=exit_code)
    assert "odd\n" in out, out
    assert set(guarded.record(tmp_path)["failures"]) == {
        "sync: results: not copied: ValueError: unheard of"
    }
    # The machine is kept only if the results are nowhere else.
    assert (tmp_path / "hook").is_file() is (exit_code == 0)
    kept = "not run: the results may exist nowhere else"
    assert guarded.record(tmp_path)["on_finish"].startswith(kept) is (exit_code == 84)
    assert ("NOT SYNCED" in out) is (exit_code == 84)


@long
def test_an_unusable_place_is_found_before_anything_is_paid_for(tmp_path: Path) -> None:
    # It holds a push, which would be pulled for as long as that takes.
    (tmp_path / "there/state/e/f").mkdir(parents=True)
    (tmp_path / "there/state/e/f/finished.json").touch()
    (tmp_path / "there/state/.guard").touch()
    options = ("--sync-to", "there", *guarded.HOOK)
    out = guarded.run(tmp_path, *options, command=["touch", "worked"], code=1)
    assert "nothing was started" in out and out.count("\n") == 1
    assert ".guard" in out and not (tmp_path / "worked").exists()


@long
@pytest.mark.parametrize(
    ("more", "n_tries", "message"),
    [
        ("", N_HOOKS, f"failed {N_HOOKS} times, exit code 9"),
        # As after an outage of the provider.
        ("[ $(wc -l < tries) -lt 6 ] || exit 0;", 6, "run, exit code 0"),
        ("kill -INT $PPID;", 1, "failed, exit code 9; not retried, because a signal arrived"),
    ],
)
def test_a_failed_stop_command_is_reported(
    tmp_path: Path, more: str, n_tries: int, message: str
) -> None:
    code = 0 if message.startswith("run") else 85
    hook = ("--on-finish", f"echo x >> tries; {more} exit 9", "--without-sync")
    out = guarded.run(tmp_path, *hook, command=["true"], patch=guarded.AT_ONCE, code=code)
    assert ("NOT STOPPED" in out) is (code == 85), out
    assert (tmp_path / "tries").read_text() == "x\n" * n_tries
    assert guarded.record(tmp_path)["on_finish"] == message


@long
def test_secrets_are_not_printed(tmp_path: Path) -> None:
    hook = ("--on-finish", "true TOKEN123", "--without-sync")
    out = guarded.run(tmp_path, *hook, command=["true", "TOKEN456"])
    push = ("--push", "rsync://me:TOKEN789@localhost:1/x")
    refused = guarded.run(tmp_path, *push, command=["true"], code=1)
    assert "rsync://localhost:1/x" in refused
    written = tmp_path / "results" / "guard.json"
    text = out + refused + (written.read_text() if written.is_file() else "")
    assert "TOKEN" not in text
