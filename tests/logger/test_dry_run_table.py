"""The table of a dry run: which events it handles, what it prints, and when it prints nothing."""

import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.tests import MockOutputSettings

from snakemake_logger_plugin_expertflow import LogHandler, LogHandlerSettings

PRICED = "0.42 to 0.94 hours; 1.0 to 2.3 dollars; 1 x H100 SXM; plan; $2.49/h of 2026-11-01"
UNPRICED = "2 to 4.1 hours; unknown dollars; 1 x L40S; estimate from bytes; no price"
UNKNOWN = "unknown hours; unknown dollars; cpu; a reason; in two parts"


def handler(**settings: Any) -> LogHandler:
    common = MockOutputSettings()
    for name, value in {"dryrun": True, "stdout": True, **settings}.items():
        setattr(common, name, value)
    # The table alone: here Snakemake reports the jobs.
    return LogHandler(common_settings=common, settings=LogHandlerSettings(snakemake=True))


def event(
    kind: LogEvent | None, text: str = "m", *, level: int = logging.INFO, **extra: Any
) -> logging.LogRecord:
    record = logging.LogRecord("snakemake", level, "p", 1, text, (), None)
    record.__dict__.update(event=kind, **extra)
    return record


ENDED = event(None, "This was a dry-run (flag -n). The order of jobs does not reflect …")


def job(
    rule: str, expert: str | None = "a", forecast: str | None = None, **more: Any
) -> logging.LogRecord:
    wildcards = {} if expert is None else {"expert": expert}
    resources = SimpleNamespace(**({} if forecast is None else {"forecast": forecast}))
    kind, given = LogEvent.JOB_INFO, {"wildcards": wildcards, "resources": resources}
    return event(kind, rule_name=rule, **given, **more)


TRAINED = job("train_expert", "a", PRICED)
UNPRICED_B = job("train_expert", "b", UNPRICED)


def printed(
    capsys: pytest.CaptureFixture[str], *records: logging.LogRecord, **settings: Any
) -> list[str]:
    tested = handler(**settings)
    for record in records:
        tested.emit(record)
    tested.close()
    tested.close()
    return capsys.readouterr().out.splitlines()


def test_experts_are_listed_in_order_with_their_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    others = (job("compare_experts", None), job("evaluate_expert", "finished"))
    lines = printed(capsys, ENDED, UNPRICED_B, job("pack_sequences", "a"), TRAINED, *others)
    assert lines == [
        "",
        "What the trainings should take; other jobs are not included",
        "expert  jobs  hours         dollars     on            basis",
        "a       2     0.42 to 0.94  1.0 to 2.3  1 x H100 SXM  plan; $2.49/h of 2026-11-01",
        "b       1     2 to 4.1      unknown     1 x L40S      estimate from bytes; no price",
        "total   3     2.4 to 5.0    unknown",
        "Other jobs: unknown for those that never ran: evaluate_expert, pack_sequences",
    ]
    # There is no total of unknown figures.
    last = printed(capsys, ENDED, TRAINED, job("train_expert", "b", UNKNOWN))[-1]
    assert last == "b       1     unknown       unknown     cpu           a reason; in two parts"


def test_figures_of_an_outdated_record_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    packed = UNPRICED.replace("estimate from bytes", "estimate from packed tokens")
    again = "; rebuilt in this run, these figures are from before"
    for rule, forecast in (("plan_training", PRICED), ("pack_sequences", packed)):
        planned = job("train_expert", "a", forecast)
        assert printed(capsys, ENDED, job(rule, "a"), planned)[3].endswith(again)
        assert not printed(capsys, ENDED, job(rule, "b"), planned)[3].endswith(again)
    unplanned = job("train_expert", "a", UNPRICED)
    assert not printed(capsys, ENDED, job("plan_training", "a"), unplanned)[3].endswith(again)


def test_a_modules_rules_may_have_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    place = "results/a/logs"
    train = job("ef_train_expert", "a", PRICED, log=[f"{place}/train_expert.log"])
    plan = job("ef_plan_training", "a", "1 to 2 s", log=[f"{place}/plan_training.log"])
    lines = printed(capsys, ENDED, train, plan)
    known = printed(capsys, ENDED, TRAINED, job("plan_training", "a", "1 to 2 s"))
    assert lines == known and "rebuilt in this run" in lines[3]


def test_other_jobs_are_expected_to_take_their_last_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "results" / "a" / "logs" / "evaluate_expert.log"
    log.parent.mkdir(parents=True)
    spans = ((0.0, 360.0, 0), (400.0, 1120.0, 0), (1200.0, 9000.0, 1))
    attempts = [dict(zip(("start_s", "end_s", "code"), span, strict=True)) for span in spans]
    log.with_suffix(".attempts.json").write_text(json.dumps({"attempts": attempts}))
    evaluated = job("evaluate_expert", log=[str(log)])
    took = "Other jobs: 0.20 hours, 1 as last run here"
    total = "Total: 0.62 to 1.1 hours, 1.5 to 2.8 dollars, one job at a time"
    assert printed(capsys, ENDED, TRAINED, evaluated)[-2:] == [took, total]
    # Without a price, without the training's hours, with a job that never ran, without training.
    unpriced = job("train_expert", "a", UNPRICED)
    total = "Total: 2.2 to 4.3 hours, one job at a time"
    assert printed(capsys, ENDED, unpriced, evaluated)[-1] == total
    assert printed(capsys, ENDED, job("train_expert", "a", UNKNOWN), evaluated)[-1] == took
    unknown = f"{took}; unknown for those that never ran: export_model"
    exported = job("export_model", log=[str(tmp_path / "export_model.log")])
    assert printed(capsys, ENDED, TRAINED, evaluated, exported)[-1] == unknown
    assert printed(capsys, ENDED, evaluated) == ["", "Nothing to train.", took]
    # Jobs that never ran are modeled.
    modeled = job("export_model", forecast="36 to 360 s", log=[str(tmp_path / "export_model.log")])
    lines = printed(capsys, ENDED, TRAINED, UNPRICED_B, evaluated, modeled)
    assert lines[-2:] == [
        "Other jobs: 0.21 to 0.30 hours, 1 as last run here, 1 as modeled",
        "Total: 2.6 to 5.3 hours, one job at a time",
    ]
    # Unreadable records count as unknown.
    log.with_suffix(".attempts.json").write_text('{"attempts": [1]}')
    assert printed(capsys, ENDED, evaluated)[-1].endswith("that never ran: evaluate_expert")


def test_without_a_training_there_is_one_line_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = event(None, "Nothing to be done (all is).")
    for last in ((ENDED, job("compare_experts", None)), (nothing,)):
        assert printed(capsys, *last) == ["", "Nothing to train."]
    # Jobs hidden by --quiet are not reported as none.
    stats = event(LogEvent.RUN_INFO, stats={"train_expert": 2, "total": 9})
    lines = printed(capsys, stats, quiet=["progress", "rules"])
    assert lines == []
    # In a real run, a failed one, one without jobs yet, and one left before its end.
    failed = event(None, level=logging.ERROR)
    left = event(LogEvent.RUN_INFO, stats={"train_expert": 1})
    assert printed(capsys, ENDED, TRAINED, dryrun=False) == []
    assert printed(capsys, ENDED, TRAINED, failed) == []
    assert printed(capsys, event(LogEvent.WORKFLOW_STARTED)) == []
    assert printed(capsys, left, TRAINED) == []


def test_unknown_events_break_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    odd = (
        event(LogEvent.JOB_INFO),
        event(LogEvent.RUN_INFO, stats="changed"),
        event(LogEvent.JOB_INFO, rule_name=None, wildcards=["expert"], resources=None),
    )
    forecasts = (None, "another text", "soon to be hours; 1 to x dollars; L4; plan")
    jobs = (job("train_expert", *one) for one in zip("abc", forecasts, strict=True))
    lines = printed(capsys, ENDED, *odd, *jobs)
    assert [line.split()[0] for line in lines[3:]] == ["a", "b", "c"]
    assert lines[3].endswith("unknown  no forecast; jobs in groups have none")


def test_a_closed_reader_is_ignored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``snakemake -n | head``: logging would print a traceback for each line."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    tested = handler()
    tested.settings.snakemake = False
    for record in (TRAINED, ENDED):
        tested.emit(record)
    tested.close()
    assert capsys.readouterr().err == ""
