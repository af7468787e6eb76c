"""The view of a run: lines from Snakemake's events, and real runs in a pipe and a terminal."""

import json
import logging
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.tests import MockOutputSettings
from warm_python import warm_jobs, warm_python
from workflow_space import LIMIT_S, REPORT, Workspace

from expertflow.config.guard import describe_failure
from snakemake_logger_plugin_expertflow import LogHandler


def event(kind: LogEvent | None, text: str = "m", **extra: Any) -> logging.LogRecord:
    level = logging.ERROR if kind in (LogEvent.ERROR, LogEvent.JOB_ERROR) else logging.INFO
    record = logging.LogRecord("snakemake", level, "p", 1, text, (), None)
    record.__dict__.update(event=kind, **extra)
    return record


STARTED = event(LogEvent.WORKFLOW_STARTED)
TOTAL = event(LogEvent.RUN_INFO, stats={"total": 12})
PACK = event(
    LogEvent.JOB_INFO, jobid=4, rule_name="pack_sequences", wildcards={"expert": "mine"},
    log=["absent.log"], reason="Missing output files: a, b; Input files updated by another job: c",
)  # fmt: skip
SHARD = event(
    LogEvent.JOB_INFO, jobid=5, rule_name="prepare_shard", log=[], reason="Updated input files: x",
    wildcards={"expert": "mine", "source": "docs", "shard": "000"},
)  # fmt: skip
BEFORE = """'{"rate":1,"why":"it\\'s a; b"}','4fe2ac56720aa96d'"""
NOW = """'{"rate":2,"why":"it\\'s a; b","x":null}','5d0c36a0c3b1d4a1'"""
PLAN = event(
    LogEvent.JOB_INFO, jobid=6, rule_name="plan_training", log=[], wildcards={"expert": "mine"},
    reason="Params have changed since last execution: Union of exclusive params before and now"
    f" across all output: before: {BEFORE} now: {NOW} ",
)  # fmt: skip
PACKED, FAILED = event(LogEvent.JOB_FINISHED, job_id=4), event(LogEvent.JOB_ERROR, jobid=5)
WORDS = event(None, "Select jobs to execute...")
REASON = event(LogEvent.ERROR, "MissingRuleException:\nNo rule to produce mine")


def show(capsys: pytest.CaptureFixture[str], *records: logging.LogRecord, **given: Any) -> str:
    common = MockOutputSettings()
    for name, value in given.items():
        setattr(common, name, value)
    handler = LogHandler(common_settings=common, settings=None)
    assert handler.writes_to_stream is not (common.verbose or common.debug_dag)
    for record in records:
        handler.emit(record)
    handler.close()
    return re.sub(r" +", " ", capsys.readouterr().err)


def test_a_job_is_one_line_and_snakemakes_output_is_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = (STARTED, TOTAL, WORDS, PACK, SHARD, PACKED, FAILED)
    assert (
        show(capsys, *run)
        == " 1/12 pack_sequences mine 0.0 s\nfailed prepare_shard mine docs 000 0.0 s\n"
    )
    # Before a run its output is the answer, as for --unlock and --lint.
    assert (
        show(capsys, event(None, "Unlocked working directory.")) == "Unlocked working directory.\n"
    )
    assert show(capsys, *run, verbose=True) == ""


def test_a_job_took_as_long_as_its_own_attempt(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # A training that was published again keeps its attempt of ten minutes, from before.
    for end_s, took in ((9e9, "10.0 min"), (1e9, "0.0 s")):
        attempt = {"start_s": end_s - 600, "end_s": end_s, "code": 0}
        (tmp_path / "a.attempts.json").write_text(json.dumps({"attempts": [attempt]}))
        pack = event(
            LogEvent.JOB_INFO, jobid=4, rule_name="pack_sequences", wildcards={"expert": "mine"},
            log=[str(tmp_path / "a.log")], reason="",
        )  # fmt: skip
        assert show(capsys, STARTED, TOTAL, pack, PACKED) == f" 1/12 pack_sequences mine {took}\n"


@pytest.mark.parametrize("error", ["the loss diverged", None])
def test_a_retry_that_repeats_an_error_at_once_is_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, error: str | None
) -> None:
    (tmp_path / "a.attempts.json").write_text(json.dumps({"attempts": [{"error": error}]}))
    train = event(
        LogEvent.JOB_INFO, jobid=7, rule_name="train_expert", wildcards={"expert": "mine"},
        log=[str(tmp_path / "a.log")],
    )  # fmt: skip
    ended = event(LogEvent.JOB_ERROR, jobid=7), event(None, "Trying to restart job 7.")
    other = event(None, "Trying to restart job 70.")
    told = show(capsys, STARTED, TOTAL, *(train, *ended) * 2, other)
    n_shown = 1 if error else 2
    assert told.count("failed train_expert") == n_shown
    assert told.count("restart job 7.") == (0 if error else 2) and "restart job 70." in told


def test_quiet_hides_jobs_but_not_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    line = "error: mine: no file or rule has this name; to make that expert:"
    for quiet in (None, ["all"], ["rules", "progress"]):
        told = show(capsys, STARTED, TOTAL, PACK, PACKED, REASON, quiet=quiet)
        assert told.splitlines()[-1].startswith(line) and ("pack_sequences" in told) is (
            quiet is None
        )
    # That a job failed is not a reason; its own line is printed when Snakemake ends.
    for text in (
        "RuleException:\nCalledProcessError in",
        "Exiting because a job execution failed.",
    ):
        assert show(capsys, event(LogEvent.ERROR, text)) == ""


def test_a_dry_run_lists_jobs_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    told = show(capsys, STARTED, PACK, SHARD, PLAN, dryrun=True)
    assert told.splitlines() == [
        "would run pack_sequences mine missing output files",
        "would run prepare_shard mine docs 000 updated input files: x",
        "would run plan_training mine params have changed since last execution: code, rate",
        "total 3 jobs",
    ]


# The remains of a library's progress bar come after its last word.
TOLD_TO_STOP = """
import atexit
from expertflow.core import cli, errors
def main():
    raise errors.Interrupted("signal 15")
atexit.register(print, "Loading weights: 100%")
cli.run(main, interrupted="it starts anew")
"""


@pytest.mark.chain
def test_a_run_into_a_pipe(space: Workspace) -> None:
    done = space.snakemake(REPORT, "--forcerun", "build_report")
    assert re.search("\n +1/1  build_report +tiny +[0-9.]+ s\n$", done.stderr)
    assert done.stdout.splitlines()[-1].split()[0] == "report"
    # Its last lines may have no reader.
    warm = warm_python() / "snakemake"
    command = f"{warm} -c 2 {REPORT} -R build_report | true; exit ${{PIPESTATUS[0]}}"
    assert space.execute("bash", "-c", command, **warm_jobs()).returncode == 0
    log = max((space.root / ".snakemake" / "log").glob("*.log"))
    assert "Select jobs to execute" in log.read_text()
    # An unexpected fault, a killed job, and a job that is asked to stop.
    script, path = "workflow/scripts/build_report.py", "results/tiny/logs/build_report.log"
    for code, reason in (
        ("raise ValueError('boom')", f"ValueError: boom; this is unexpected, see {path}"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "build_report ended without a message, as if killed",
        ),
        (
            TOLD_TO_STOP,
            "build_report was stopped by a signal; run the same command again to continue",
        ),
    ):
        (space.root / script).write_text(code)
        done = space.snakemake(REPORT, "--quiet", "all")
        before, last = done.stderr.splitlines()[-2:]
        assert done.returncode == 1 and before == path and last.startswith(f"error: {reason}")


def test_a_line_that_did_not_fit_into_its_log_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    log = tmp_path / "a.log"
    for text in ("", "error: results/tin"):
        log.write_text(text)
        told = describe_failure(log)
        assert re.match(rf"error: {log}: file system /.* has 4\.1 kB free, too little", told)
    log.write_text("error: all of it\n")
    assert describe_failure(log) == "error: all of it"


@pytest.mark.chain
def test_a_terminal_shows_running_jobs(space: Workspace) -> None:
    main, other = pty.openpty()
    arguments = ("--cores", "2", REPORT, "--forcerun", "build_report")
    with subprocess.Popen(
        [warm_python() / "snakemake", *arguments],
        cwd=space.root, env=space.environment({"TERM": "xterm", **warm_jobs()}),
        stdin=other, stdout=other, stderr=other,
    ) as process:  # fmt: skip
        os.close(other)
        told = b""
        try:
            while data := os.read(main, 4096):
                told += data
        except OSError:  # how Linux reports that the other side is closed
            pass
        assert process.wait(LIMIT_S) == 0, told.decode()
    os.close(main)
    assert re.search(r"  build_report tiny  [0-9.]+ s", told.decode())
    assert re.search(r" +1/1  build_report +tiny +[0-9.]+ s", told.decode())


def test_mistakes_on_the_command_line_get_the_right_command(space: Workspace) -> None:
    unquoted = ("--config", "preset=full", "hardware=H100", "SXM")
    for arguments, line in (
        (("-n", "mine"), "to make that expert: snakemake results/mine/report.json"),
        (("-n", *unquoted), "quote a value with spaces: --config 'hardware=H100 SXM'"),
        (("-n", "--config", "preset=full", REPORT), f"before --config: snakemake {REPORT} --conf"),
        (("-n", "--config", "a.b.c=1"), "a.b.c has a dot; write --config 'a={b: {c: 1}}'"),
        (("--report", "r.zip"), f"finished: snakemake --report report.zip {REPORT}"),
    ):
        assert line in space.refused(*arguments)
