"""report.json as a whole: golden files, the paths that outlive versions, and honest nulls."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.diagnose import MISSING, look_up
from expertflow.report.inputs import ReportInputs

GOLDEN = Path(__file__).parent / "golden"
KEPT_PATHS = (
    "training_parameters.warmup_steps",
    "training_parameters.batch_size",
    "training_parameters.gradient_accumulation_steps",
    "training_report.hardware.collection_interval_seconds",
    "training_report.training.epoch_summaries",
)


@pytest.mark.parametrize("variant", ["gpu", "cpu"])
def test_report_equals_golden(variant: str, request: pytest.FixtureRequest) -> None:
    """To accept a wanted change: EXPERTFLOW_UPDATE_GOLDEN=1 pytest tests/report."""
    report = _rounded(request.getfixturevalue(f"{variant}_report"))
    path = GOLDEN / f"report-{variant}.json"
    if os.environ.get("EXPERTFLOW_UPDATE_GOLDEN"):
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert report == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", ["gpu", "cpu"])
def test_report_passes_its_check(variant: str, request: pytest.FixtureRequest) -> None:
    check_report(
        request.getfixturevalue(f"{variant}_report"),
        request.getfixturevalue(f"{variant}_inputs"),
    )


@pytest.mark.parametrize("path", KEPT_PATHS)
def test_paths_of_older_readers_stay(path: str, gpu_report: dict[str, Any]) -> None:
    assert look_up(gpu_report, path) not in (None, MISSING)


def test_no_reason_for_what_is_there(cpu_report: dict[str, Any]) -> None:
    for path in cpu_report["unavailable"]:
        assert look_up(cpu_report, path) is None, path


@pytest.mark.parametrize(
    ("record", "changes", "path", "reason"),
    [
        ("monitor", {"configured_interval_s": None}, "collection_interval_seconds", "automatic"),
        ("monitor", {"power_w": None, "unavailable": {"power_w": "denied"}}, "power_w", "denied"),
        (
            "training",
            {"sampled_steps": None, "unavailable": {"sampled_steps": "too few steps"}},
            "time.forward_s",
            "too few steps",
        ),
        ("training", {"gpu_name": None}, "gpu.name", "did not tell the card's name"),
    ],
)
def test_what_a_record_lacks_is_null_with_its_reason(
    record: str, changes: dict[str, Any], path: str, reason: str, gpu_inputs: ReportInputs
) -> None:
    inputs = replace(gpu_inputs, **{record: replace(getattr(gpu_inputs, record), **changes)})
    report = build_report(inputs, {})
    check_report(report, inputs)
    where = path if path.startswith("time.") else f"training_report.hardware.{path}"
    assert reason in report["unavailable"][where]


def test_epoch_without_evaluation_says_so(gpu_inputs: ReportInputs) -> None:
    first, last = gpu_inputs.training.epoch_summaries
    training = replace(gpu_inputs.training, epoch_summaries=(first, replace(last, eval_loss=None)))
    report = build_report(replace(gpu_inputs, training=training), {})
    check_report(report, gpu_inputs)
    path = "training_report.training.epoch_summaries[1].eval_loss"
    assert report["unavailable"][path] == "no evaluation fell into this epoch"


def test_provenance_of_the_caller_is_kept(gpu_inputs: ReportInputs) -> None:
    report = build_report(gpu_inputs, {"git": "abc", "container": "x"})
    assert report["provenance"]["git"] == "abc"
    assert report["provenance"]["container"] == "x"
    assert report["provenance"]["torch"] == "2.9.1+cu128"
    assert "provenance.command" in report["unavailable"]


def _rounded(value: Any) -> Any:
    """Leave ten digits of floats: the last ones depend on the machine's maths library."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
