"""The sentence that sums a run up."""

from typing import Any

import made_up_evaluation as made_up
import pytest
from msgspec.structs import replace

from expertflow.evaluate.records import EvaluationRecord
from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.verdict import verdict

Report = dict[str, Any]
SAME = "no measurable change"


def _metric(report: Report, difference: float, half: float, word: str) -> Report:
    change = report["evaluation"]["changes"][1]
    change |= {"difference": difference, "ci95": [difference - half, difference + half]}
    change["change"] = word
    return report


def _judged(inputs: ReportInputs, evaluation: EvaluationRecord) -> Report:
    inputs = replace(inputs, evaluation=evaluation)
    return dict(build_report(inputs, {})["verdict"])


def test_the_paired_change_decides(gpu_report: Report) -> None:
    assert verdict(gpu_report)["learned"] == "yes"
    assert "(+56.5 points, 95 % interval +49.7 to +63.3)" in verdict(gpu_report)["sentence"]
    unclear = verdict(_metric(gpu_report, 0.01, 0.02, SAME))
    assert (unclear["level"], unclear["learned"]) == ("mixed", "unclear")
    assert "no measurable change (+1.0 points, 95 % interval" in unclear["sentence"]
    assert "Held-out loss fell from 1.874 to 0.566" in unclear["sentence"]
    worse = verdict(_metric(gpu_report, -0.15, 0.05, "worse"))
    assert (worse["level"], worse["learned"]) == ("bad", "no")
    assert "Execution accuracy fell" in worse["sentence"]


def test_what_an_answer_without_a_model_equals_is_not_learned(cpu_inputs: ReportInputs) -> None:
    sides = {"before": (0, 6.2), "after": (37, 2.11)}
    for n_correct, level, learned, said in (
        (20, "good", "yes", "It beats the best answer without a model (constant, 10.0 %)"),
        (40, "mixed", "unclear", "does not measurably beat answering without a model (constant,"),
        (60, "bad", "no", "It is worse than answering without a model (constant, 30.0 %)"),
    ):
        found = _judged(
            cpu_inputs,
            made_up.make_evaluation(**sides, baselines={"nearest": 3, "constant": n_correct}),
        )
        assert (found["level"], found["learned"]) == (level, learned)
        assert said in found["sentence"]
        assert "Execution accuracy rose from 0.0 % to 18.5 %" in found["sentence"]


@pytest.mark.parametrize(
    ("after", "learned", "said"),
    [
        (0.566, "yes", "Held-out loss fell from 1.874 to 0.566 nats a token on 200 held-out doc"),
        (1.88, "unclear", "to 1.880 nats a token on 200 held-out documents: no measurable change"),
    ],
)
def test_without_a_metric_the_loss_decides(
    after: float, learned: str, said: str, cpu_inputs: ReportInputs
) -> None:
    found = _judged(cpu_inputs, made_up.make_bare(before=1.874, after=after))
    assert found["learned"] == learned and said in found["sentence"]


def test_a_loss_without_an_interval_shows_nothing(cpu_inputs: ReportInputs) -> None:
    bare = made_up.make_bare(before=1.874, after=0.566)
    bare = replace(bare, changes=(), unavailable={"changes": "there is one document only"})
    found = _judged(cpu_inputs, bare)
    assert (found["level"], found["learned"]) == ("mixed", "unclear")
    assert found["sentence"].startswith("There is one document only. Held-out loss went from 1.874")


def test_a_task_that_was_not_scored_is_not_answered_for_by_its_loss(
    cpu_inputs: ReportInputs,
) -> None:
    found = _judged(cpu_inputs, made_up.not_scored(cpu_inputs.evaluation, "Node is not installed"))
    assert (found["level"], found["learned"]) == ("mixed", "unclear")
    assert "The task was not scored: Node is not installed. Held-out loss fell" in found["sentence"]


def test_verdict_does_not_trust_a_leak(gpu_report: Report) -> None:
    gpu_report["evaluation"]["documents_shared_with_training"] = 1
    assert verdict(gpu_report)["learned"] == "unclear"
