"""Each check of a run refuses its own fault, and lets pass what is no fault."""

from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.report.build import build_report
from expertflow.report.check import check_against_records, check_report, check_tokens
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]


def _stopped(report: Report, *, tokens: int) -> Report:
    """Let the second epoch end after 100 steps."""
    training = report["training_report"]["training"]
    training["epoch_summaries"][1] |= {"steps": 100, "tokens": tokens}
    training |= {"steps": 1_000, "epochs": 1_000 / 900}
    report["data"]["trained_tokens"] = 43_200_000 + tokens
    return report


def test_part_of_an_epoch_holds_at_most_its_rows(gpu_report: Report) -> None:
    cells = 100 * 32 * 1_536
    check_tokens(_stopped(gpu_report, tokens=cells))
    with pytest.raises(DataError, match=r"epoch_summaries\[1\]\.tokens: 4,915,201 in 100 of 900"):
        check_tokens(_stopped(gpu_report, tokens=cells + 1))


def test_epochs_of_another_order_are_not_held_against_the_rows(gpu_report: Report) -> None:
    gpu_report["data"]["useful_tokens"] = 1
    gpu_report["training_report"]["training"]["epochs"] = 2.5
    check_tokens(gpu_report)


def test_documents_on_the_fly_are_not_held_against_the_rows(gpu_report: Report) -> None:
    gpu_report["data"]["useful_tokens"] = 1
    with pytest.raises(DataError, match=r"epoch_summaries\[0\]\.tokens"):
        check_tokens(gpu_report)
    gpu_report["training_report"]["training"]["on_the_fly"] = True
    check_tokens(gpu_report)


def test_other_rows_than_packed_are_refused(gpu_report: Report, gpu_inputs: ReportInputs) -> None:
    held_out = replace(gpu_inputs.packing.held_out, sha256="00" * 32)
    inputs = replace(gpu_inputs, packing=replace(gpu_inputs.packing, held_out=held_out))
    with pytest.raises(DataError, match="other rows than packing"):
        check_against_records(gpu_report, inputs)


def _seen_until(inputs: ReportInputs, seconds: float) -> ReportInputs:
    last = replace(inputs.samples[-1], elapsed_s=seconds)
    return replace(inputs, samples=(*inputs.samples[:-1], last))


# The last step is at 2,628.5 s of 2,712 s, and 1 % are 27.12 s; 5 s are for leaving.
@pytest.mark.parametrize(
    ("seen_s", "agree"),
    [(2_602.0, True), (2_601.0, False), (2_744.0, True), (2_745.0, False)],
)
def test_monitor_and_loop_tell_one_time(
    seen_s: float, agree: bool, gpu_report: Report, gpu_inputs: ReportInputs
) -> None:
    inputs = _seen_until(gpu_inputs, seen_s)
    if agree:
        check_against_records(gpu_report, inputs)
        return
    with pytest.raises(DataError, match="the monitor's last reading"):
        check_against_records(gpu_report, inputs)


def test_short_runs_are_allowed_two_intervals(gpu_report: Report, gpu_inputs: ReportInputs) -> None:
    monitor = replace(gpu_inputs.monitor, effective_interval_s=40.0)
    check_against_records(gpu_report, replace(_seen_until(gpu_inputs, 2_549.0), monitor=monitor))


def test_monitor_that_died_is_no_witness(gpu_report: Report, gpu_inputs: ReportInputs) -> None:
    died = replace(gpu_inputs.monitor, monitor_cpu_fraction=None)
    inputs = replace(_seen_until(gpu_inputs, 5.0), monitor=died)
    check_against_records(gpu_report, inputs)
    check_against_records(gpu_report, replace(gpu_inputs, samples=()))


def test_a_plan_without_prediction_passes(cpu_inputs: ReportInputs) -> None:
    report = build_report(cpu_inputs, {})
    assert report["plan"]["step_hours"] is None and report["plan"]["memory"] is None
    check_report(report, cpu_inputs)
