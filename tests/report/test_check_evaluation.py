"""Each check of the evaluation refuses its own fault, and names the path."""

from collections.abc import Callable
from typing import Any

import pytest

from expertflow.core.errors import DataError
from expertflow.report.check.report import check_report
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]
Fault = tuple[Callable[[Report], object], str]


def _evaluation(change: Callable[[Report], object]) -> Callable[[Report], object]:
    return lambda report: change(report["evaluation"])


FAULTS: dict[str, Fault] = {
    "a verdict too many": (
        _evaluation(lambda e: e["after"]["n_by_kind"].update(other=1)),
        "after.n_by_kind: 201 verdicts",
    ),
    "correct ones of another number": (
        _evaluation(lambda e: e["before"].update(n_correct=10)),
        "before.n_by_kind: 200 verdicts, 9 correct; 200 answers, 10 correct",
    ),
    "another fraction": (
        _evaluation(lambda e: e["before"].update(value_fraction=0.05)),
        "before.value_fraction: 0.05 is not 9 of 200",
    ),
    "a score outside its interval": (
        _evaluation(lambda e: e["after"].update(ci95=[0.62, 0.7])),
        "after.value_fraction: 0.61 is outside its interval",
    ),
    "a loss outside its interval": (
        _evaluation(lambda e: e["after"].update(held_out_loss_ci95=[0.6, 0.7])),
        "after.held_out_loss: 0.566 is outside its interval",
    ),
    "more cut off than answered": (
        _evaluation(lambda e: e["after"].update(n_cut_off=201)),
        "after.n_cut_off: more than the 200",
    ),
    "a change of another size": (
        _evaluation(lambda e: e["changes"][1].update(difference=0.55)),
        "changes[1].difference: 0.55 is not 0.61 less 0.045",
    ),
    "a loss that changed otherwise": (
        _evaluation(lambda e: e["changes"][0].update(difference=-1.3)),
        "changes[0].difference: -1.3 is not 0.566 less 1.874",
    ),
    "a change outside its interval": (
        _evaluation(lambda e: e["changes"][1].update(ci95=[0.6, 0.7])),
        "changes[1].difference: 0.565 is outside",
    ),
    "a lower loss called worse": (
        _evaluation(lambda e: e["changes"][0].update(change="worse")),
        "changes[0].change: 'worse', the interval says 'better'",
    ),
    "a change that the interval does not show": (
        _evaluation(lambda e: e["changes"][1].update(ci95=[-0.1, 0.9])),
        "changes[1].change: 'better', the interval says 'no measurable change'",
    ),
    "a change over other questions": (
        _evaluation(lambda e: e["changes"][1].update(n=199)),
        "changes[1].n: 199, but 200 were asked",
    ),
    "a baseline that is not so far": (
        _evaluation(lambda e: e["baselines"][2]["change"].update(difference=0.31)),
        "baselines[2].change.difference: 0.31 is not 0.61 less 0.31",
    ),
    "a change of what was not measured": (
        _evaluation(lambda e: e["baselines"][0].update(value_fraction=None)),
        "baselines[0].change: a change of what was not measured",
    ),
    "a baseline of other verdicts": (
        _evaluation(lambda e: e["baselines"][0].update(n_examples=100)),
        "baselines[0].n_by_kind",
    ),
    "a regression that is none": (
        _evaluation(lambda e: e["earlier"]["change"].update(change="worse")),
        "earlier.change.change: 'worse', the interval says 'no measurable change'",
    ),
    "no candidate is published": (
        _evaluation(lambda e: e["published"]["candidates"][1].update(published=False)),
        "published.candidates: published is step 1200, marked are []",
    ),
    "another candidate is published": (
        _evaluation(lambda e: e["published"].update(step=1800)),
        "published.candidates: published is step 1800, marked are [1200]",
    ),
    "two are published": (
        _evaluation(lambda e: e["published"]["candidates"][2].update(published=True)),
        "published.candidates: published is step 1200, marked are [1200, 1800]",
    ),
    "candidates were asked other questions": (
        _evaluation(lambda e: e["published"].update(n_questions=90)),
        "published.candidates[0].n_examples: 100, not the 90",
    ),
    "another step is exported": (
        lambda report: report["export"].update(published_step=1800),
        "export.published_step: 1800, but step 1200 was evaluated; run export_model again",
    ),
    "a pair is lost": (
        _evaluation(lambda e: e["judge"].update(n_pairs=60)),
        "judge: 50 verdicts (12 ties, 4 of them inconsistent) and 1 failures for 60 pairs",
    ),
    "more contradictions than ties": (
        _evaluation(lambda e: e["judge"].update(n_inconsistent=13)),
        "judge: 50 verdicts (12 ties, 13 of them inconsistent)",
    ),
    "another win fraction": (
        _evaluation(lambda e: e["judge"].update(win_fraction=0.7)),
        "judge.win_fraction: 0.7, the verdicts say 0.74",
    ),
    "no earlier one, and no reason": (
        lambda report: (
            report["evaluation"].update(earlier=None),
            report["unavailable"].pop("evaluation.earlier", None),
        ),
        "evaluation.earlier: null without a reason",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(
    name: str, gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    change, message = FAULTS[name]
    change(gpu_report)
    with pytest.raises(DataError, match=r"^report\.json") as error:
        check_report(gpu_report, schema, gpu_inputs)
    assert message in str(error.value)


def test_few_differing_pairs_are_no_change_beside_zero(
    gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    gpu_report["evaluation"]["changes"][1]["change"] = "no measurable change"
    check_report(gpu_report, schema, gpu_inputs)


def test_losses_may_be_summed_in_another_order(
    gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    gpu_report["evaluation"]["changes"][0]["difference"] += 5e-4
    check_report(gpu_report, schema, gpu_inputs)


def test_a_judge_that_never_answered_passes(
    gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    gpu_report["evaluation"]["judge"] |= {
        "n_wins": 0, "n_losses": 0, "n_ties": 0, "n_inconsistent": 0, "n_failed": 51,
        "win_fraction": None, "ci95": None,
    }  # fmt: skip
    for key in ("win_fraction", "ci95"):
        gpu_report["unavailable"][f"evaluation.judge.{key}"] = "no pair was judged"
    check_report(gpu_report, schema, gpu_inputs)
