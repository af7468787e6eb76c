"""Each check refuses its own fault, and names the path."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from report_reading import MISSING, set_at

from expertflow.core.errors import DataError
from expertflow.report import records, run_records
from expertflow.report.check import check_report
from expertflow.report.inputs import ReportInputs

SCHEMA = Path(__file__).parents[2] / "workflow" / "schemas" / "report.schema.yaml"
Report = dict[str, Any]
TRAINING = "training_report.training"
FAULTS = [
    ("run.colour", "blue", "run"),
    ("data.documents", MISSING, "documents"),
    ("time.wall_s", "long", "time.wall_s"),
    ("run.preset", None, "run.preset"),
    ("throughput.mfu_fraction", 1.4, "throughput.mfu_fraction"),
    (f"{TRAINING}.epoch_summaries.1", MISSING, "epoch_summaries: 1 entries for 2 epochs"),
    (f"{TRAINING}.epochs", 2.01, "epoch_summaries: 2 entries for 3 epochs"),
    ("training_parameters.warmup_steps", 1800, "training_parameters.warmup_steps"),
    ("time.train_s", 2_450.0, "time: the parts"),
    ("time.other_s", 40.0, "time: the parts"),
    ("cost.usd", 2.10, "cost.usd"),
    ("cost.hours", 0.76, "cost.hours"),
    ("cost.usd_per_hour", None, "cost.usd"),
    ("data.trained_tokens", 86_400_001, "tokens add up to 86,400,000, not to 86,400,001"),
    (f"{TRAINING}.steps", 1_799, "epoch_summaries: steps add up to 1,800, not to 1,799"),
    ("data.useful_tokens", 43_200_001, "epoch_summaries[0].tokens: 43,200,000 in 900 of 900"),
    ("cost.billed_usd", 1.0, "cost.billed_usd: 1.0 is not"),
    ("findings.0.worth_usd", 9.0, "findings: worth $9"),
    ("plan.save_hours", 0.5, "plan.hours: is 0.73"),
    ("plan.memory.step_bytes", 1, "plan.memory_peak_bytes"),
    ("training_report.hardware.power_w", None, "hardware.power_w: null without a reason"),
    ("data.sources.1.licence", None, "data.sources[1].licence"),
    ("unavailable", {"model.revision": ""}, "unavailable"),
    ("comparison", [{"anything": 1}], "comparison"),
    ("export.published_step", 1800, "but step 1200 was evaluated; run export_model again"),
]
EVALUATION_FAULTS = [
    ("after.n_by_kind.other", 1, "after.n_by_kind: 201 verdicts"),
    ("before.n_correct", 10, "n_by_kind: 200 verdicts, 9 correct; 200 answers, 10 correct"),
    ("before.value_fraction", 0.05, "before.value_fraction: 0.05 is not 9 of 200"),
    ("after.ci95", [0.62, 0.7], "after.value_fraction: 0.61 is outside its interval"),
    ("after.held_out_loss_ci95", [0.6, 0.7], "held_out_loss: 0.566 is outside its interval"),
    ("after.n_cut_off", 201, "after.n_cut_off: more than the 200"),
    ("changes.1.difference", 0.55, "changes[1].difference: 0.55 is not 0.61 less 0.045"),
    ("changes.0.difference", -1.3, "changes[0].difference: -1.3 is not 0.566 less 1.874"),
    ("changes.1.ci95", [0.6, 0.7], "changes[1].difference: 0.565 is outside"),
    ("changes.0.change", "worse", "changes[0].change: 'worse', the interval says 'better'"),
    ("changes.1.ci95", [-0.1, 0.9], "'better', the interval says 'no measurable change'"),
    ("changes.1.n", 199, "changes[1].n: 199, but 200 were asked"),
    ("baselines.2.change.difference", 0.31, "[2].change.difference: 0.31 is not 0.61 less 0.31"),
    ("baselines.0.value_fraction", None, "baselines[0].change: a change of what was not measured"),
    ("baselines.0.n_examples", 100, "baselines[0].n_by_kind"),
    ("earlier.change.change", "worse", "'worse', the interval says 'no measurable change'"),
    ("published.candidates.1.published", False, "published is step 1200, marked are []"),
    ("published.step", 1800, "published.candidates: published is step 1800, marked are [1200]"),
    ("published.candidates.2.published", True, "step 1200, marked are [1200, 1800]"),
    ("published.n_questions", 90, "published.candidates[0].n_examples: 100, not the 90"),
    ("judge.n_pairs", 60, "judge: 50 verdicts (12 ties, 4 of them inconsistent) and 1 failures"),
    ("judge.n_inconsistent", 13, "judge: 50 verdicts (12 ties, 13 of them inconsistent)"),
    ("judge.win_fraction", 0.7, "judge.win_fraction: 0.7, the verdicts say 0.74"),
    ("earlier", None, "evaluation.earlier: null without a reason"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [*FAULTS, *((f"evaluation.{path}", *rest) for path, *rest in EVALUATION_FAULTS)],
)
def test_fault_is_named(
    path: str,
    value: Any,
    message: str,
    gpu_report: Report,
    gpu_inputs: ReportInputs,
) -> None:
    set_at(gpu_report, path, value)
    with pytest.raises(DataError, match=rf"^report\.json.*{re.escape(message)}"):
        check_report(gpu_report, gpu_inputs)


def _single_step(report: Report) -> None:
    report["training_parameters"] |= {"total_steps": 1, "warmup_steps": 0}


def _time_one_percent_off(report: Report) -> None:
    report["time"]["other_s"] += 0.009 * report["time"]["wall_s"]


def _no_change_beside_zero(report: Report) -> None:
    """Too few pairs differ for a word, though the interval lies beside zero."""
    report["evaluation"]["changes"][1]["change"] = "no measurable change"


def _losses_summed_in_another_order(report: Report) -> None:
    report["evaluation"]["changes"][0]["difference"] += 5e-4


def _judge_never_answered(report: Report) -> None:
    report["evaluation"]["judge"] |= {
        "n_wins": 0, "n_losses": 0, "n_ties": 0, "n_inconsistent": 0, "n_failed": 51,
        "win_fraction": None, "ci95": None,
    }  # fmt: skip
    for key in ("win_fraction", "ci95"):
        report["unavailable"][f"evaluation.judge.{key}"] = "no pair was judged"


@pytest.mark.parametrize(
    "change",
    [
        _single_step,
        _time_one_percent_off,
        _no_change_beside_zero,
        _losses_summed_in_another_order,
        _judge_never_answered,
    ],
)
def test_what_is_no_fault_passes(change: Any, gpu_report: Report, gpu_inputs: ReportInputs) -> None:
    change(gpu_report)
    check_report(gpu_report, gpu_inputs)


def test_every_key_is_described() -> None:
    """By itself, or, in records of other stages, by the description of the record."""
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    for name, node in schema["$defs"].items():
        assert len(node["description"]) > 10, name
        cls = getattr(records, name, None) or getattr(run_records, name, None)
        declared = cls.__annotations__ if cls and "report" in cls.__module__ else ()
        for key in declared:
            below = node["properties"].get(key, node)
            assert "description" in below or "$ref" in str(below), (name, key)


@pytest.mark.parametrize("variant", ["gpu_report", "cpu_report"])
def test_the_schema_holds_for_a_report(variant: str, request: pytest.FixtureRequest) -> None:
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    report = request.getfixturevalue(variant)
    jsonschema.validate(report, schema)
    report["time"]["wall_s"] = None
    with pytest.raises(jsonschema.ValidationError, match="None is not of type"):
        jsonschema.validate(report, schema)
