"""Code shared by scripts: one-line errors, stages and their records, ends of attempts."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS, run_script, wait_for

from expertflow.core import cli
from expertflow.core.attempts import (
    ATTEMPT,
    CARDS,
    LOG,
    RUN,
    Attempt,
    attempts_path,
    read_attempts,
    will_fail_again,
)
from expertflow.core.errors import DataError, single_line
from expertflow.core.files import sha256_file, sha256_json, sha256_text, sidecar_of
from expertflow.core.progress import ProgressCounter, break_silence, show_activity
from expertflow.core.records import Record, read_record, write_record
from expertflow.core.sidecars import Sidecar, write_sidecar


def failing(error: Exception) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def test_a_users_error_is_one_line_and_a_bug_keeps_its_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=r"^error: a b$"):
        cli.run(failing(DataError("a\n  b")))
    full = OSError(errno.ENOSPC, "No space left on device", "results/x.arrow")
    line = r"results/x\.arrow: no space left on device; file system /.* has .* free; free some"
    with pytest.raises(SystemExit, match=line):
        cli.run(failing(full))
    with pytest.raises(ZeroDivisionError):
        cli.run(failing(ZeroDivisionError()))
    # A card's error has both, and a number as its code, since a later attempt may succeed.
    with pytest.raises(SystemExit, match=r"^1$"):
        cli.run(failing(type("AcceleratorError", (RuntimeError,), {})("CUDA error: ECC\nx")))
    first, *_, last = capfd.readouterr().err.splitlines()
    assert first.startswith("Traceback") and last.startswith("error: a card failed (CUDA error: E")


class Heat(Record, frozen=True, kw_only=True):
    degrees: int


def bake(
    spec: Heat,
    code: str,
    loaf: str,
    oven: Heat,
    others: list[Heat],
    salt: Path | None = None,
    hours: float = 1.5,
) -> dict[str, Any]:
    degrees = [spec.degrees, oven.degrees, *(other.degrees for other in others)]
    return {"loaf": loaf, "degrees": degrees, "salt": salt and salt.name, "hours": hours}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs the stage ``bake`` and returns its record, or the exit code."""
    for i in range(3):
        write_record(tmp_path / f"{i}.json", Heat(degrees=i))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["bake.py", "--output", "made.json", *words])
        with pytest.raises(SystemExit) as caught:
            cli.run_stage(bake)
        return caught.value.code or json.loads(Path("made.json").read_text())

    return run


NEEDED = ("--code", "c", "--loaf", "rye", "--oven", "0.json", "--others", "1.json", "2.json")


IMPORTING = """
import contextlib, signal
from expertflow.core import cli
with cli.heavy_imports(), contextlib.suppress(KeyboardInterrupt):
    signal.raise_signal(signal.SIGINT)
print("went on")
"""


@pytest.mark.parametrize(("ignored", "code"), [(False, -signal.SIGINT), (True, 0)])
def test_ctrl_c_during_imports_is_not_lost(ignored: bool, code: int) -> None:
    def hear() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)

    command = [sys.executable, "-c", IMPORTING]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, preexec_fn=hear)
    assert (done.returncode, done.stdout) == (code, "went on\n" * ignored), done.stderr


def test_a_stage_takes_its_functions_parameters(stage: Callable[..., Any]) -> None:
    spec = '{"degrees":9}'
    made = {"loaf": "rye", "degrees": [9, 0, 1, 2], "salt": None, "hours": 1.5}
    assert stage("--spec", spec, *NEEDED) == made
    made_with = read_record(Sidecar, sidecar_of(Path("made.json")))
    flags = ["--output", "made.json", *NEEDED[2:]]
    assert made_with == Sidecar(
        rule="bake",
        output="made.json",
        sha256=sha256_file(Path("made.json")),
        spec_sha256=sha256_text(spec),
        code="c",
        flags_sha256=sha256_json(flags),
        written_s=made_with.written_s,
    )
    more = stage("--spec", spec, *NEEDED, "--salt", "a/b", "--hours", "2")
    assert more == {**made, "salt": "b", "hours": 2.0}


def test_a_sidecar_lists_only_bytes_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    record, mine = tmp_path / "results" / "made.json", tmp_path / "mine.jsonl"
    for path in (record, mine):
        path.write_text("{}")
    read = {mine: sha256_file(mine)}
    write_sidecar(record, spec="", code="", outside=read)
    assert read_record(Sidecar, sidecar_of(record)).files == {str(mine): read[mine]}
    mine.write_text("{ }")
    with pytest.raises(DataError, match=r"mine\.jsonl: changed while it was read; run again"):
        write_sidecar(record, spec="", code="", outside=read)


def test_a_terminal_obeys_no_control_characters_in_data() -> None:
    hidden = "a\x1b[2J\u202e\udcff\n"
    record = logging.LogRecord("x", logging.INFO, "x", 1, "%s", (hidden,), None)
    assert cli.printable_handler().format(record).endswith("a<U+001B>[2J<U+202E><U+DCFF>\n")
    assert single_line(hidden) == "a<U+001B>[2J<U+202E><U+DCFF>"


def test_a_stage_rejects_inputs_that_differ_from_the_declaration(stage: Callable[..., Any]) -> None:
    assert "spec: object contains unknown field x" in stage(
        "--spec", '{"degrees":9,"x":1}', *NEEDED
    )
    assert "--spec is not JSON" in stage("--spec", "{", *NEEDED)
    assert "9.json: the record is missing" in stage(
        "--spec", '{"degrees":9}', *NEEDED, "--oven", "9.json"
    )
    assert stage("--spec", '{"degrees":9}') == 2


def test_a_silent_job_reports_its_activity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with break_silence(every_s=0.01):
        wait_for(lambda: [m for m in caplog.messages if m.startswith("still running, 0 s after")])
        with cli.heavy_imports():
            wait_for(lambda: "importing torch, 0 s after the start" in caplog.messages)
        with show_activity(lambda: "step 3/9"):
            wait_for(lambda: [m for m in caplog.messages if m.startswith("step 3/9, 0 s after")])
        progress = ProgressCounter("e/000", total=2000, unit="documents")
        assert progress.describe() == "e/000: 0 of 2,000 documents (0%)"
        progress.add(2000)
        line = r"e/000: 2,000 of 2,000 documents \(100%\), .*/s, about 0 s left, 0 s after"
        with show_activity(progress.describe):
            wait_for(lambda: [m for m in caplog.messages if re.match(line, m)])


JOB = """
import os, sys, time
from pathlib import Path
from expertflow.core import attempts, cli
from expertflow.core.errors import ConfigError, TransientError
attempts.TOUCH_EVERY_S = 0.01
def main():
    assert attempts.LOG not in os.environ, "processes of a job are no jobs"
    print("here", flush=True)
    # Byte by byte, so that the next line is left to who comes in its place.
    action = b"".join(iter(lambda: os.read(0, 1).strip(), b"")).decode()
    if action == "fail":
        raise ConfigError("no")
    if action == "launch":
        command = [sys.executable, "-c", os.environ["JOB"]]
        os.environ.update(attempts.environment_of_attempt())
        os.execv(sys.executable, command)
    if action in ("train", "publish"):
        assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1", "its log has no use for bars"
        attempts.note_state(Path("state").resolve(), is_done=action == "publish")
    if action == "miss":
        raise TransientError("not yet")
cli.run(main)
"""


def start_job(path: Path, *, n_cards: int = 0, attempt: int = 1) -> subprocess.Popen[str]:
    environment = os.environ | {LOG: str(path), CARDS: str(n_cards), "PYTHONPATH": str(SCRIPTS)}
    environment |= {ATTEMPT: str(attempt), "JOB": JOB}
    command = [sys.executable, "-c", JOB]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def attempts_after(path: Path, *actions: str) -> list[Attempt]:
    for action in actions:
        start_job(path).communicate(f"{action}\n")
    return list(read_attempts(attempts_path(path)))


def test_a_republished_state_has_the_cost_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, state = tmp_path / "train_expert.log", tmp_path / "state"
    state.mkdir()
    paid = attempts_after(path, "fail", "train")
    assert [a.code for a in paid] == [1, 0]
    assert all(a.start_s < a.end_s <= time.time() for a in paid)
    assert attempts_after(path, "fail") != paid == attempts_after(path, "publish")
    # Another training ran in between, and a damaged model is remade from its checkpoint.
    assert attempts_after(path, "end") != paid == attempts_after(path, "publish")
    again = attempts_after(path, "train")
    assert again[:-1] == paid and attempts_after(path, "publish") == again
    state.rename(tmp_path / "gone")
    assert len(attempts_after(path, "publish")) == 1


def test_a_later_attempt_ends_with_an_error_that_would_recur(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    attempts_after(path, "miss", "fail")
    assert [a.error for a in read_attempts(attempts_path(path))] == [None, "error: no"]
    before = attempts_path(path).read_bytes()
    again = start_job(path, attempt=2)
    assert again.communicate("end\n") == ("", "error: no\n") and again.returncode == 1
    assert attempts_path(path).read_bytes() == before
    assert will_fail_again(str(path))
    # A separate run tries again, even if its first attempt could record nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN, "another")
        assert not will_fail_again(str(path))
        assert start_job(path, attempt=2).communicate("fail\n")[0] == "here\n"
    # So does an attempt after an error that may pass.
    attempts_after(path, "miss")
    assert start_job(path, attempt=2).communicate("end\n")[0] == "here\n"
    assert read_attempts(attempts_path(path))[-1].code == 0
    attempts_path(path).write_text("{")
    assert [a.code for a in attempts_after(path, "end")] == [0], "a damaged file is started again"


def test_processes_of_a_launcher_record_the_same_attempt(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    job = start_job(path, n_cards=2)
    job.communicate("launch\nfail\n")
    (attempt,) = read_attempts(attempts_path(path))
    assert (attempt.code, attempt.error, attempt.n_cards) == (1, "error: no", 2)


def test_a_killed_attempt_ends_where_it_was_last_seen(tmp_path: Path) -> None:
    path = tmp_path / "evaluate_expert.log"
    job = start_job(path, n_cards=2)
    assert job.stdout is not None and job.stdout.readline() == "here\n"
    (running,) = read_attempts(attempts_path(path))
    alive_s = running.end_s + 0.1
    wait_for(lambda: read_attempts(attempts_path(path))[0].end_s > alive_s)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    (killed,) = read_attempts(attempts_path(path))
    assert killed.code is None and alive_s < killed.end_s <= time.time() and killed.n_cards == 2
    assert attempts_after(path, "end")[0] == killed, "the next one does not make it longer"


def test_other_tasks_record_nothing(tmp_path: Path) -> None:
    log = {LOG: str(tmp_path / "job.log")}
    for place in ({}, {**log, "SLURM_PROCID": "1"}, {**log, "RANK": "1"}):
        environment = os.environ | {"PYTHONPATH": str(SCRIPTS)} | place
        subprocess.run(
            [sys.executable, "-c", JOB], env=environment, input="end\n", text=True, check=True
        )
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["mine/plan.json", "mine"])
def test_a_wrong_path_of_a_plan_needs_no_repair(tmp_path: Path, given: str) -> None:
    (tmp_path / "mine").mkdir()
    done = run_script("show_plan", given, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "there is no plan; correct the path, or run snakemake mine/plan.json\n"
    )
    done = run_script("show_report", given.replace("plan", "report"), cwd=tmp_path)
    assert done.stderr.endswith(
        "mine/report.json: there is no report; run snakemake mine/report.json\n"
    )
