"""What goes wrong with the guard itself, or is told to it wrongly, costs neither work nor money."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from guarded import end, record, run, start, start_trainer, trainer, wait_for
from support import SCRIPTS

from expertflow.core.errors import ConfigError
from expertflow.rental.guard.options import Settings, settings_from
from expertflow.rental.guard.session import TIMED_OUT, Session, run_hook
from expertflow.rental.guard.timers import Notice

HOOK = ("--disk-stays", "--on-finish", "touch hook")
# A guard whose watch breaks as soon as the trainer is at work.
BROKEN = """
import sys
from pathlib import Path

sys.path.insert(0, {scripts!r})
from expertflow.rental.guard.timers import Stalled

def poll(stalled):
    if Path("starts.txt").is_file():
        raise RuntimeError("unheard of")

Stalled.poll = poll
sys.argv[0] = {program!r}
exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"))
"""


def settings(*options: str) -> Settings:
    return settings_from([*options, "--", "true"], None)


def test_a_second_guard_in_a_folder_is_refused(tmp_path: Path) -> None:
    options = ("--sync-to", str(tmp_path / "there"), *HOOK)
    first = start_trainer(tmp_path, *options)
    hold = tmp_path / "state" / ".guard" / "hold"
    hold.mkdir()
    code, out = run(tmp_path, *options, command=["false"])
    assert code == 1 and "another guard" in out and out.count("\n") == 1
    assert first.poll() is None and hold.is_dir() and not (tmp_path / "hook").exists()
    first.terminate()
    assert end(first)[0] == 84
    # Its lock ends with it.
    assert run(tmp_path, command=["true"])[0] == 0


def test_results_elsewhere_keep_the_machine(tmp_path: Path) -> None:
    work = ["bash", "-c", "mkdir -p run1/results; touch run1/results/weights"]
    options = ("--sync-to", str(tmp_path / "there"), "--sync-retries", "0", *HOOK)
    code, out = run(tmp_path, *options, command=work)
    assert code == 84 and "nothing below results" in out
    assert not (tmp_path / "hook").exists()


@pytest.mark.parametrize("words", [["-d", "run1"], ["--directory=run1"]])
def test_a_snakemake_in_another_folder_is_refused(words: list[str]) -> None:
    command = ["/opt/bin/snakemake", "all", *words]
    with pytest.raises(ConfigError, match="--results and --state"):
        settings_from(["--", *command], None)
    settings_from(["--results", "run1/results", "--state", "run1/state", "--", *command], None)
    settings_from(["--", "tool", "-d", "x"], None)


@pytest.mark.parametrize("option", ["--sync-to", "--push"])
def test_a_copy_on_the_same_disk_is_none(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ("--sync-to", "s3://b/x", "--results", str(tmp_path / "results"), option, "bucket/run1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--disk-stays where it stays"):
        settings(*there, "--on-finish", "stop")
    settings(*there)
    settings(*there, "--on-finish", "stop", "--disk-stays")


def test_books_that_cannot_be_kept_keep_no_results_back(tmp_path: Path) -> None:
    work = "mkdir results; echo x > results/x; rm -r state/.guard; touch state/.guard"
    options = ("--sync-to", str(tmp_path / "there"), "--sync-retries", "0", *HOOK)
    price = ("--usd-per-hour", "1", "--max-usd", "5")
    code, out = run(tmp_path, *price, *options, command=["bash", "-c", work])
    assert code == 84 and "could not be written down" in out
    assert (tmp_path / "there" / "results" / "x").read_text() == "x\n"
    assert not (tmp_path / "hook").exists()


def test_a_watch_that_breaks_saves_and_copies_first(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x").touch()
    program = str(SCRIPTS / "guard_run.py")
    (tmp_path / "broken.py").write_text(BROKEN.format(scripts=str(SCRIPTS), program=program))
    options = ["--sync-to", str(tmp_path / "there"), *HOOK, "--", *trainer(tmp_path)]
    done = subprocess.run(
        [sys.executable, "broken.py", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1 and "unheard of" in done.stderr
    assert (tmp_path / "saved.txt").is_file() and (tmp_path / "hook").is_file()
    assert (tmp_path / "there" / "results" / "x").is_file()
    assert record(tmp_path)["why"].startswith("the guard itself failed")


def test_a_spent_budget_does_not_end_the_tries_that_end_the_paying(tmp_path: Path) -> None:
    there = tmp_path / "there"
    script = "mkdir results; echo x > results/x; rm -r there; touch there; exec sleep 600"
    # Dollars are seconds: time enough for the script to come to its sleep on a busy machine.
    price = ("--usd-per-hour", "3600", "--max-usd", "30", "--reserve-seconds", "1")
    guard = start(tmp_path, *price, "--sync-to", str(there), *HOOK, command=["bash", "-c", script])
    assert guard.stdout is not None
    while "trying again" not in guard.stdout.readline():
        assert guard.poll() is None
    there.unlink()
    code, out = end(guard)
    assert code == 80 and (tmp_path / "hook").is_file(), out


def test_a_pull_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    price = ("--usd-per-hour", "3600", "--max-usd", "4", "--reserve-seconds", "1")
    session = Session(settings(*price))
    session.start_meter()
    with pytest.raises(ConfigError, match="spent while states were pulled; nothing was started"):
        with session.within_budget("states were pulled"):
            assert session.copies.cancel.wait(60)
    with pytest.raises(ConfigError, match="raise --max-usd"):
        Session(settings(*price)).start_meter()


def test_a_stop_command_that_hangs_has_failed(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > '{tmp_path}/child'; wait"
    assert run_hook(command, {}, limit_s=20.0) == TIMED_OUT
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: _is_gone(child), said="what the stop command started goes on")


def test_a_signal_ends_the_tries_of_the_stop_command(tmp_path: Path) -> None:
    hook = ("--on-finish", "echo x >> tries; kill -INT $PPID; exit 9", "--without-sync")
    code, out = run(tmp_path, *hook, command=["true"])
    assert code == 85, out
    assert (tmp_path / "tries").read_text() == "x\n"


def test_no_notice_command_leaves_children_behind(tmp_path: Path) -> None:
    child = tmp_path / "child"
    notice = Notice(f"sleep 600 & echo $! > '{child}.new'; mv '{child}.new' '{child}'; wait")
    notice.poll()
    wait_for(child.is_file, said="the notice command did not start")
    notice.close()
    wait_for(lambda: _is_gone(int(child.read_text())), said="its child goes on")


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
