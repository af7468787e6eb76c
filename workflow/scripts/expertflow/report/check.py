"""Refuse a report that contradicts itself, lacks a key, or is silent about a missing value."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.records import from_json
from expertflow.plan.cost import billed_hours
from expertflow.report import records
from expertflow.report.derive import n_epochs_started
from expertflow.report.findings.evidence import steps_per_epoch, why_rows_differ
from expertflow.report.inputs import ReportInputs
from expertflow.report.learned import BETTER, LOSSES, NO_CHANGE, WORSE
from expertflow.report.measured import null_paths

Report = dict[str, Any]

TIME_PARTS = (
    "startup_s", "data_wait_s", "h2d_s", "train_s", "checkpoint_s", "eval_s", "other_s",
)  # fmt: skip
PLAN_PARTS = ("step_hours", "save_hours", "eval_hours", "startup_hours")
MEMORY_PARTS = ("model_bytes", "optimizer_bytes", "step_bytes", "reserve_bytes")
ROUNDING = 1e-6
FRACTION_ROUNDING = 1e-9
LOSS_ROUNDING = 1e-3  # nats: per document and over packed rows, losses are summed in another order
MAX_CLOCK_GAP_FRACTION = 0.01
LEAVING_S = 5.0  # processes part and the monitor hears of it after the run's clock was read
PLACE = "report.json.evaluation"
# Nulls that no reason is asked for: the record that they stand in has it, or they are choices.
INTENTIONAL = re.compile(
    r"comparison\[|findings\[|acceptance\[|training_report\.hardware\.machine\."
    r"|plan\.reasons\[\d+\]\.source_value|plan_against_actual\[\d+\]\.plan_(low|high)"
    r"|evaluation\.judge\.reason|staging\.used\.rows$"
)


def read_report(path: Path) -> Report:
    """Read a finished report, as a reader of its figures needs it.

    Raises:
        DataError: it is missing, damaged, or of another version of the schema.
    """
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no report; run snakemake {path}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); delete it and make it again") from error
    try:
        from_json(records.Report, report, where="report.json")
    except DataError as error:
        raise DataError(
            f"{path}: older or damaged ({error}); delete it and make it again"
        ) from error
    return report


def check_report(report: Report, inputs: ReportInputs) -> None:
    """Check form first, then what the numbers say together, then the report against its records.

    Raises:
        DataError: with the path of the first fault in report.json.
    """
    from_json(records.Report, report, where="report.json")
    for check in CHECKS:
        check(report)
    check_against_records(report, inputs)
    for path in null_paths(report):
        if path not in report["unavailable"] and not INTENTIONAL.match(path):
            raise DataError(f"report.json.{path}: null without a reason in 'unavailable'")


def _check_epochs(report: Report) -> None:
    training = report["training_report"]["training"]
    started, found = n_epochs_started(training["epochs"]), len(training["epoch_summaries"])
    if found != started:
        raise DataError(
            "report.json.training_report.training.epoch_summaries: "
            f"{found} entries for {started} epochs started"
        )


def _check_warmup(report: Report) -> None:
    parameters = report["training_parameters"]
    n_warmup, n_steps = parameters["warmup_steps"], parameters["total_steps"]
    if n_warmup >= n_steps:
        raise DataError(
            f"report.json.training_parameters.warmup_steps: {n_warmup} is not below "
            f"total_steps {n_steps}"
        )


def _check_time(report: Report) -> None:
    time = report["time"]
    parts_s, wall_s = sum(time[part] or 0.0 for part in TIME_PARTS), time["wall_s"]
    if abs(parts_s - wall_s) > 0.01 * wall_s:
        raise DataError(
            f"report.json.time: the parts add up to {parts_s:.3f} s, wall_s is {wall_s:.3f} s"
        )


def _check_cost(report: Report) -> None:
    cost, hours = report["cost"], report["time"]["wall_s"] / 3600
    if abs(cost["hours"] - hours) > 1e-9 * hours:
        raise DataError(f"report.json.cost.hours: {cost['hours']} is not wall_s = {hours} h")
    usd, rate = cost["usd"], cost["usd_per_hour"]
    if (usd is None) != (rate is None):
        raise DataError("report.json.cost.usd: must be known exactly when usd_per_hour is")
    if usd is None:
        return
    billed = billed_hours(hours, report["plan"]["billing_minutes"])
    for key, expected in (("usd", rate * hours), ("billed_usd", rate * billed)):
        value = cost[key]
        if value is None or abs(value - expected) > ROUNDING * max(expected, 1e-9):
            raise DataError(f"report.json.cost.{key}: {value} is not rate x hours = {expected}")


def check_tokens(report: Report) -> None:
    """Check that epochs add up, and that a full one has the tokens of every packed row."""
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


def _check_worth(report: Report) -> None:
    worth = sum(finding["worth_usd"] or 0.0 for finding in report["findings"])
    usd = report["cost"]["usd"]
    if worth > (usd or 0.0) * (1 + ROUNDING):
        raise DataError(f"report.json.findings: worth ${worth:.4f} together, the run cost ${usd}")


def _check_plan(report: Report) -> None:
    plan, memory = report["plan"], report["plan"]["memory"]
    if plan["step_hours"] is not None:
        _adds_up("hours", plan["hours"] or 0.0, [plan[part] or 0.0 for part in PLAN_PARTS])
    if memory is not None:
        parts = [memory[part] for part in MEMORY_PARTS]
        _adds_up("memory_peak_bytes", plan["memory_peak_bytes"] or 0, parts)


def _adds_up(name: str, whole: float, parts: list[float]) -> None:
    if abs(sum(parts) - whole) > ROUNDING * max(whole, sum(parts)):
        raise DataError(f"report.json.plan.{name}: is {whole:.6g}, its parts are {sum(parts):.6g}")


def _check_scores(report: Report) -> None:
    for place, scored in _scored(report["evaluation"]):
        _check_counts(place, scored)
        _check_inside(f"{place}.value_fraction", scored["value_fraction"], scored["ci95"])
    for name in ("before", "after"):
        side = report["evaluation"][name]
        for key in ("held_out_loss", "perplexity"):
            _check_inside(f"{PLACE}.{name}.{key}", side[key], side[f"{key}_ci95"])
        if (side["n_cut_off"] or 0) > (side["n_examples"] or 0):
            raise DataError(f"{PLACE}.{name}.n_cut_off: more than the {side['n_examples']} answers")


def _scored(evaluation: Report) -> Iterator[tuple[str, Report]]:
    for name in ("before", "after"):
        yield f"{PLACE}.{name}", evaluation[name]
    for index, baseline in enumerate(evaluation["baselines"]):
        yield f"{PLACE}.baselines[{index}]", baseline
    for index, candidate in enumerate(evaluation["published"]["candidates"]):
        yield f"{PLACE}.published.candidates[{index}]", candidate


def _check_counts(place: str, scored: Report) -> None:
    if scored["value_fraction"] is None:
        return
    n, n_correct, kinds = scored["n_examples"], scored["n_correct"], scored["n_by_kind"]
    if sum(kinds.values()) != n or kinds.get("correct", 0) != n_correct:
        raise DataError(
            f"{place}.n_by_kind: {sum(kinds.values())} verdicts, {kinds.get('correct', 0)} correct;"
            f" {n} answers, {n_correct} correct"
        )
    if not n or abs(scored["value_fraction"] - n_correct / n) > FRACTION_ROUNDING:
        raise DataError(
            f"{place}.value_fraction: {scored['value_fraction']} is not {n_correct} of {n}"
        )


def _check_inside(place: str, value: float | None, ci95: list[float] | None) -> None:
    if value is None or ci95 is None:
        return
    slack = FRACTION_ROUNDING * max(1.0, abs(value))
    if not ci95[0] - slack <= value <= ci95[1] + slack:
        raise DataError(f"{place}: {value} is outside its interval {ci95[0]} to {ci95[1]}")


def _check_changes(report: Report) -> None:
    evaluation = report["evaluation"]
    before, after = evaluation["before"], evaluation["after"]
    for index, change in enumerate(evaluation["changes"]):
        place = f"{PLACE}.changes[{index}]"
        is_loss = change["quantity"] in LOSSES
        key = change["quantity"] if is_loss else "value_fraction"
        _check_difference(place, change, after[key], before[key])
        if not is_loss and change["n"] != after["n_examples"]:
            raise DataError(f"{place}.n: {change['n']}, but {after['n_examples']} were asked")
    for index, baseline in enumerate(evaluation["baselines"]):
        if baseline["change"] is not None:
            place, value = f"{PLACE}.baselines[{index}].change", baseline["value_fraction"]
            _check_difference(place, baseline["change"], after["value_fraction"], value)
    if evaluation["earlier"] and evaluation["earlier"]["change"]:
        _check_word(f"{PLACE}.earlier.change", evaluation["earlier"]["change"])


def _check_difference(place: str, change: Report, one: float | None, other: float | None) -> None:
    if one is None or other is None:
        raise DataError(f"{place}: a change of what was not measured")
    is_loss = change["quantity"] in LOSSES
    slack = LOSS_ROUNDING * max(1.0, one, other) if is_loss else FRACTION_ROUNDING
    if abs(change["difference"] - (one - other)) > slack:
        raise DataError(f"{place}.difference: {change['difference']} is not {one} less {other}")
    _check_word(place, change)


def _check_word(place: str, change: Report) -> None:
    _check_inside(f"{place}.difference", change["difference"], change["ci95"])
    if change["change"] == NO_CHANGE:
        return  # so few pairs may differ that even an interval beside zero proves nothing
    low, high = change["ci95"]
    rose, fell = (WORSE, BETTER) if change["quantity"] in LOSSES else (BETTER, WORSE)
    word = rose if low > 0 else fell if high < 0 else NO_CHANGE
    if change["change"] != word:
        raise DataError(f"{place}.change: {change['change']!r}, the interval says {word!r}")


def _check_published(report: Report) -> None:
    published = report["evaluation"]["published"]
    candidates = published["candidates"]
    marked = [candidate["step"] for candidate in candidates if candidate["published"]]
    if candidates and marked != [published["step"]]:
        raise DataError(
            f"{PLACE}.published.candidates: published is step {published['step']}, marked are"
            f" {marked}"
        )
    for index, candidate in enumerate(candidates):
        n = candidate["n_examples"]
        if candidate["value_fraction"] is not None and n != published["n_questions"]:
            raise DataError(
                f"{PLACE}.published.candidates[{index}].n_examples: {n}, not the"
                f" {published['n_questions']} that all were asked"
            )
    if report["export"]["published_step"] != published["step"]:
        raise DataError(
            f"report.json.export.published_step: {report['export']['published_step']}, but step"
            f" {published['step']} was evaluated; run export_model again"
        )


def _check_judge(report: Report) -> None:
    judge = report["evaluation"]["judge"]
    if judge is None:
        return
    counted = judge["n_wins"] + judge["n_losses"] + judge["n_ties"]
    if counted + judge["n_failed"] != judge["n_pairs"] or judge["n_inconsistent"] > judge["n_ties"]:
        raise DataError(
            f"{PLACE}.judge: {counted} verdicts ({judge['n_ties']} ties,"
            f" {judge['n_inconsistent']} of them inconsistent) and {judge['n_failed']} failures for"
            f" {judge['n_pairs']} pairs"
        )
    won = (judge["n_wins"] + judge["n_ties"] / 2) / counted if counted else None
    said = judge["win_fraction"]
    if (said is None) != (won is None) or (
        said is not None and abs(said - won) > FRACTION_ROUNDING
    ):
        raise DataError(f"{PLACE}.judge.win_fraction: {said}, the verdicts say {won}")
    _check_inside(f"{PLACE}.judge.win_fraction", said, judge["ci95"])


CHECKS: tuple[Callable[[Report], None], ...] = (
    _check_epochs, _check_warmup, _check_time, _check_cost, check_tokens, _check_worth, _check_plan,
    _check_scores, _check_changes, _check_published, _check_judge,
)  # fmt: skip


def check_against_records(report: Report, inputs: ReportInputs) -> None:
    """Compare the run with the rows that were packed, and its clock with the monitor's.

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
    # The monitor must have watched until the last step, and not beyond the run's end; both go by
    # the clock of the run. A monitor that died before the end is no witness.
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
