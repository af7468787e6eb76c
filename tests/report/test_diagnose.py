"""Findings speak above their threshold, are silent below their evidence, and price only losses."""

from typing import Any

import pytest

from expertflow.core.errors import ConfigError
from expertflow.report.diagnose import MISSING, accept, bottleneck, find, look_up
from expertflow.report.records import AcceptanceRule, Finding
from expertflow.report.verdict import verdict

Report = dict[str, Any]


def _found(report: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in find(report)}


@pytest.mark.parametrize(
    ("code", "part", "limit"),
    [
        ("data-wait", "data_wait_s", 0.05),
        ("checkpoint-time", "checkpoint_s", 0.02),
        ("evaluation-time", "eval_s", 0.05),
        ("start-up", "startup_s", 0.10),
    ],
)
def test_lost_time(code: str, part: str, limit: float, gpu_report: Report) -> None:
    wall_s = gpu_report["time"]["wall_s"]
    gpu_report["time"][part] = (limit - 0.003) * wall_s
    assert code not in _found(gpu_report)
    gpu_report["time"][part] = (limit + 0.003) * wall_s
    found = _found(gpu_report)[code]
    other_s = gpu_report["time"]["other_s"] if code == "start-up" else 0.0
    lost_hours = ((limit + 0.003) * wall_s + other_s) / 3600
    assert found.worth_usd == pytest.approx(2.49 * lost_hours)


def test_no_price_no_worth(gpu_report: Report) -> None:
    gpu_report["cost"]["usd_per_hour"] = None
    gpu_report["time"]["data_wait_s"] = 500.0
    assert _found(gpu_report)["data-wait"].worth_usd is None


def test_silent_on_short_runs(gpu_report: Report) -> None:
    gpu_report["time"] |= {"wall_s": 40.0, "startup_s": 30.0}
    assert "start-up" not in _found(gpu_report)
    gpu_report["time"]["wall_s"] = 4_000.0
    gpu_report["training_report"]["training"]["steps"] = 19
    gpu_report["time"]["data_wait_s"] = 3_000.0
    assert "data-wait" not in _found(gpu_report)


def test_padding_is_not_priced(gpu_report: Report) -> None:
    gpu_report["data"]["padding_fraction"] = 0.31
    found = _found(gpu_report)["padding"]
    assert found.worth_usd is None and "31 %" in found.evidence


def test_few_steps_and_long_warmup(gpu_report: Report) -> None:
    assert "few-steps" not in _found(gpu_report)
    gpu_report["training_parameters"]["total_steps"] = 49
    assert "few-steps" in _found(gpu_report)
    gpu_report["training_parameters"] |= {"total_steps": 900, "warmup_steps": 180}
    assert "few-steps" in _found(gpu_report)


def test_long_rows_only_where_nothing_is_packed(gpu_report: Report) -> None:
    gpu_report["data"]["seq_len"] = 4_096
    assert "rows-too-long" not in _found(gpu_report)
    gpu_report["data"]["packing"] = "none"
    assert "rows-too-long" in _found(gpu_report)


def test_licence_and_leak_come_up(gpu_report: Report) -> None:
    gpu_report["data"]["sources"][0]["licence"] = None
    gpu_report["evaluation"]["documents_shared_with_training"] = 3
    assert "text-to-sql" in _found(gpu_report)["no-licence"].evidence
    assert find(gpu_report)[0].code == "held-out-leak"


def test_bottleneck_is_the_largest_part(gpu_report: Report) -> None:
    assert bottleneck(gpu_report)["class"] == "step"
    gpu_report["time"]["data_wait_s"] = 9_000.0
    assert bottleneck(gpu_report)["class"] == "data"


@pytest.mark.parametrize(
    ("path", "op", "value", "expected"),
    [
        ("evaluation.delta.value_fraction", ">", 0.1, "pass"),
        ("evaluation.after.held_out_loss", "<=", 0.5, "fail"),
        ("run.preset", "==", "full", "pass"),
        ("training_report.training.epoch_summaries[1].steps", ">=", 900, "pass"),
        ("training_report.hardware.tensor_active_percent.mean", ">", 25, "not measured"),
    ],
)
def test_acceptance(path: str, op: Any, value: Any, expected: str, gpu_report: Report) -> None:
    (result,) = accept(gpu_report, (AcceptanceRule(path=path, op=op, value=value),))
    assert result.verdict == expected
    assert result.rule == f"{path} {op} {value}"


@pytest.mark.parametrize(("path", "value"), [("cost.eur", 1), ("run.preset", 3), ("cost", 3)])
def test_acceptance_that_cannot_be_judged(path: str, value: Any, gpu_report: Report) -> None:
    with pytest.raises(ConfigError, match=path):
        accept(gpu_report, (AcceptanceRule(path=path, op="<", value=value),))


def test_look_up() -> None:
    report = {"a": [{"b": 1}], "n": None}
    assert look_up(report, "a[0].b") == 1
    assert look_up(report, "a[1].b") is MISSING
    assert look_up(report, "n.deep.er") is None


def test_verdict_needs_more_than_chance(gpu_report: Report) -> None:
    assert verdict(gpu_report)["learned"] == "yes"
    gpu_report["evaluation"]["delta"]["ci95"] = [-0.01, 0.03]
    unclear = verdict(gpu_report)
    assert (unclear["level"], unclear["learned"]) == ("mixed", "unclear")
    gpu_report["evaluation"]["delta"]["ci95"] = [-0.2, -0.1]
    assert verdict(gpu_report)["level"] == "bad"


def test_verdict_without_metric_goes_by_loss(gpu_report: Report) -> None:
    gpu_report["evaluation"]["delta"]["ci95"] = None
    assert "Held-out loss fell from 1.874 to 0.566" in verdict(gpu_report)["sentence"]
    gpu_report["evaluation"]["after"]["held_out_loss"] = 2.0
    assert verdict(gpu_report)["learned"] == "no"


def test_verdict_does_not_trust_a_leak(gpu_report: Report) -> None:
    gpu_report["evaluation"]["documents_shared_with_training"] = 1
    assert verdict(gpu_report)["learned"] == "unclear"


def test_failed_bars_are_in_the_answer(gpu_report: Report) -> None:
    assert gpu_report["verdict"]["answer"] == "Yes, but 1 of 3 acceptance bars failed."
    assert gpu_report["verdict"]["level"] == "mixed"
