"""report.json as a whole: golden files, the paths that outlive versions, and honest nulls."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertflow.report.build import build_report
from expertflow.report.check.report import check_report, measurable_nulls
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
def test_report_passes_its_check(
    variant: str, schema: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    check_report(
        request.getfixturevalue(f"{variant}_report"),
        schema,
        request.getfixturevalue(f"{variant}_inputs"),
    )


@pytest.mark.parametrize("path", KEPT_PATHS)
def test_paths_of_older_readers_stay(path: str, gpu_report: dict[str, Any]) -> None:
    assert look_up(gpu_report, path) not in (None, MISSING)


def test_machine_of_the_preflight_is_passed_on(gpu_inputs: ReportInputs) -> None:
    inputs = replace(gpu_inputs, preflight={"machine": {"ram_total_bytes": 1}, "n_cpus": 2})
    report = build_report(inputs, {})
    assert report["training_report"]["hardware"]["machine"] == {"ram_total_bytes": 1}


def test_automatic_interval_is_null_and_valid(
    gpu_inputs: ReportInputs, schema: dict[str, Any]
) -> None:
    monitor = replace(gpu_inputs.monitor, configured_interval_s=None)
    inputs = replace(gpu_inputs, monitor=monitor)
    report = build_report(inputs, {})
    check_report(report, schema, inputs)
    path = "training_report.hardware.collection_interval_seconds"
    assert report["unavailable"][path].startswith("automatic")


def test_gpu_run_without_timed_steps_is_valid(
    gpu_inputs: ReportInputs, schema: dict[str, Any]
) -> None:
    training = replace(
        gpu_inputs.training,
        sampled_steps=None,
        unavailable={"sampled_steps": "the run had too few steps for one to be timed"},
    )
    inputs = replace(gpu_inputs, training=training)
    report = build_report(inputs, {})
    check_report(report, schema, inputs)
    assert "too few steps" in report["unavailable"]["time.forward_s"]


def test_card_without_a_driver_is_valid(gpu_inputs: ReportInputs, schema: dict[str, Any]) -> None:
    inputs = replace(gpu_inputs, training=replace(gpu_inputs.training, gpu_name=None))
    report = build_report(inputs, {})
    check_report(report, schema, inputs)
    assert "CPU" not in report["unavailable"]["training_report.hardware.gpu.name"]


def test_report_survives_json(gpu_report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(gpu_report, allow_nan=False)) == gpu_report


def test_cpu_run_has_no_utilisation_but_a_reason(cpu_report: dict[str, Any]) -> None:
    assert cpu_report["throughput"]["mfu_fraction"] is None
    assert "CPU" in cpu_report["unavailable"]["throughput.mfu_fraction"]


def test_every_measurable_null_has_a_reason(
    cpu_report: dict[str, Any], schema: dict[str, Any]
) -> None:
    nulls = list(measurable_nulls(cpu_report, schema, schema))
    assert len(nulls) > 20
    assert set(nulls) <= set(cpu_report["unavailable"])


def test_no_reason_for_what_is_there(cpu_report: dict[str, Any]) -> None:
    for path in cpu_report["unavailable"]:
        assert look_up(cpu_report, path) is None, path


def test_reason_of_a_record_is_passed_on(gpu_inputs: ReportInputs) -> None:
    monitor = replace(gpu_inputs.monitor, power_w=None, unavailable={"power_w": "not permitted"})
    report = build_report(replace(gpu_inputs, monitor=monitor), {})
    assert report["unavailable"]["training_report.hardware.power_w"] == "not permitted"


def test_epoch_without_evaluation_says_so(gpu_inputs: ReportInputs, schema: dict[str, Any]) -> None:
    first, last = gpu_inputs.training.epoch_summaries
    training = replace(gpu_inputs.training, epoch_summaries=(first, replace(last, eval_loss=None)))
    report = build_report(replace(gpu_inputs, training=training), {})
    check_report(report, schema, gpu_inputs)
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
