"""Refuse a report whose run does not add up: its tokens, its prices, its plan, its two clocks."""

from collections.abc import Callable
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.report.inputs import ReportInputs
from expertflow.report.rows import steps_per_epoch, why_rows_differ

Report = dict[str, Any]

ROUNDING = 1e-6
MAX_CLOCK_GAP_FRACTION = 0.01
LEAVING_S = 5.0  # processes part and the monitor hears of it after the run's clock was read
PLAN_PARTS = ("step_hours", "save_hours", "eval_hours", "startup_hours")
MEMORY_PARTS = ("model_bytes", "optimizer_bytes", "step_bytes", "reserve_bytes")


def check_tokens(report: Report) -> None:
    """Make sure that epochs add up, and that a full one has the tokens of every packed row.

    Raises:
        DataError: they do not.
    """
    training, data = report["training_report"]["training"], report["data"]
    epochs, place = training["epoch_summaries"], "training_report.training.epoch_summaries"
    for key, whole in (("tokens", data["trained_tokens"]), ("steps", training["steps"])):
        total = sum(epoch[key] for epoch in epochs)
        if total != whole:
            raise DataError(f"report.json.{place}: {key} add up to {total:,}, not to {whole:,}")
    if why_rows_differ(report) is not None:
        return
    per_epoch, useful = steps_per_epoch(report), data["useful_tokens"]
    cells = report["training_parameters"]["global_batch_sequences"] * data["seq_len"]
    for index, epoch in enumerate(epochs):
        whole, tokens = epoch["steps"] == per_epoch, epoch["tokens"]
        most = useful if whole else min(useful, epoch["steps"] * cells)
        if tokens > most or (whole and tokens != useful):
            raise DataError(
                f"report.json.{place}[{index}].tokens: {tokens:,} in {epoch['steps']:,} of"
                f" {per_epoch:,} steps; the packed rows have {useful:,} and a step"
                f" {cells:,} places"
            )


def check_worth(report: Report) -> None:
    """Make sure that all fixes together save at most what the run cost.

    Raises:
        DataError: it is more.
    """
    worth = sum(finding["worth_usd"] or 0.0 for finding in report["findings"])
    usd = report["cost"]["usd"]
    if worth > (usd or 0.0) * (1 + ROUNDING):
        raise DataError(f"report.json.findings: worth ${worth:.4f} together, the run cost ${usd}")


def check_plan(report: Report) -> None:
    """Make sure that the parts of the plan's hours and of its memory add up.

    Raises:
        DataError: they do not.
    """
    plan = report["plan"]
    if plan["step_hours"] is not None:
        _adds_up("hours", plan["hours"] or 0.0, [plan[part] or 0.0 for part in PLAN_PARTS])
    if plan["memory"] is not None:
        parts = [plan["memory"][part] for part in MEMORY_PARTS]
        _adds_up("memory_peak_bytes", plan["memory_peak_bytes"] or 0, parts)


def _adds_up(name: str, whole: float, parts: list[float]) -> None:
    if abs(sum(parts) - whole) > ROUNDING * max(whole, sum(parts)):
        raise DataError(f"report.json.plan.{name}: is {whole:.6g}, its parts are {sum(parts):.6g}")


RUN_CHECKS: tuple[Callable[[Report], None], ...] = (check_tokens, check_worth, check_plan)


def check_against_records(report: Report, inputs: ReportInputs) -> None:
    """Hold the run against the rows that were packed, and its clock against the monitor's.

    Raises:
        DataError: they do not agree.
    """
    packing = inputs.packing
    rows = sha256_json([packing.train.sha256, packing.held_out.sha256])
    if inputs.training.packing_sha256 != rows:
        raise DataError(
            "report.json.provenance.packing_sha256: the run trained on other rows than packing.json"
            " describes; run train_expert again"
        )
    _check_clocks(report, inputs)


def _check_clocks(report: Report, inputs: ReportInputs) -> None:
    """Make sure that the monitor watched until the last step, and not beyond the run's end.

    Both go by the clock of the run. A monitor that died before the end is no witness.
    """
    if inputs.monitor.monitor_cpu_fraction is None or not (inputs.samples and inputs.steps):
        return
    time, interval_s = report["time"], inputs.monitor.effective_interval_s or 0.0
    allowed_s = max(2 * interval_s, MAX_CLOCK_GAP_FRACTION * time["wall_s"])
    seen_s, step_s = inputs.samples[-1].elapsed_s, inputs.steps[-1].elapsed_s
    if step_s - seen_s > allowed_s or seen_s - time["wall_s"] > allowed_s + LEAVING_S:
        raise DataError(
            "report.json.training_report.hardware: the monitor's last reading is at"
            f" {seen_s:.1f} s, the last step at {step_s:.1f} s of {time['wall_s']:.1f} s; at most"
            f" {allowed_s:.1f} s apart are allowed"
        )
