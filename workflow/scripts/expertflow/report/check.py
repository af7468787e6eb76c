"""Reject a report that contradicts itself, lacks a key, or leaves a null unexplained."""

import json
import re
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.records import from_json
from expertflow.evaluate.records import PairedChange
from expertflow.report.derive import n_epochs_started
from expertflow.report.findings.evidence import steps_per_epoch, why_rows_differ
from expertflow.report.inputs import ReportInputs
from expertflow.report.learned import BETTER, LOSSES, NO_CHANGE, WORSE
from expertflow.report.measured import Measured, is_measured, restore, to_plain
from expertflow.report.records import Interval, Report, Scored

TIME_PARTS = (
    "startup_s", "data_wait_s", "h2d_s", "train_s", "checkpoint_s", "eval_s", "other_s",
)  # fmt: skip
PLAN_PARTS = ("step_hours", "save_hours", "eval_hours", "startup_hours")
MEMORY_PARTS = ("model_bytes", "optimizer_bytes", "step_bytes", "reserve_bytes")
ROUNDING = 1e-6
FRACTION_ROUNDING = 1e-9
LOSS_ROUNDING = 1e-3  # nats: per document and over packed rows, losses are summed in another order
MAX_CLOCK_GAP_FRACTION = 0.01
LEAVING_S = 5.0  # processes exit, and the monitor notices, after the run's clock was read
PLACE = "evaluation"
EPOCHS = "training_report.training.epoch_summaries"
# Nulls that need no reason in the report: their record has it, or they are intentional.
INTENTIONAL = re.compile(
    r"comparison\[|findings\[|acceptance\[|training_report\.hardware\.machine\."
    r"|plan\.reasons\[\d+\]\.source_value|plan_against_actual\[\d+\]\.plan_(low|high)"
    r"|evaluation\.judge\.reason|staging\.used\.rows$|model\.lora\.init_"
)


def read_report(path: Path) -> Report:
    """Read a finished report; raise DataError if missing, damaged, or of another schema version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        report: Report = from_json(Report, found, where="report.json")
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no report; run snakemake {path}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); delete it and make it again") from error
    except DataError as error:
        raise DataError(
            f"{path}: outdated or damaged ({error}); delete it and make it again"
        ) from error
    # JSON has null; pages need the reason in its place.
    restored: Report = restore(report, report.unavailable)
    return restored


def check_report(report: Report, inputs: ReportInputs) -> None:
    """Check form, then numbers, then records; raise DataError with the path of the first fault."""
    plain, nulls = to_plain(report)
    from_json(Report, plain, where="report.json")
    for check in CHECKS:
        check(report)
    check_against_records(report, inputs)
    # Last, because a wrong figure gets a better message above.
    for path, reason in nulls.items():
        is_explained = reason or INTENTIONAL.match(path)
        _require(bool(is_explained), path, "null without a reason in 'unavailable'")


def _require(holds: bool, place: str, fault: str) -> None:
    if not holds:
        raise DataError(f"report.json.{place}: {fault}")


def _check_run(report: Report) -> None:
    n, n_steps = report.training_parameters.warmup_steps, report.training_parameters.total_steps
    fault = f"{n} is not below total_steps {n_steps}"
    _require(n < n_steps, "training_parameters.warmup_steps", fault)
    time, wall_s = report.time, report.time.wall_s
    parts_s = sum(getattr(time, part) or 0.0 for part in TIME_PARTS)
    fault = f"the parts add up to {parts_s:.3f} s, wall_s is {wall_s:.3f} s"
    # What the schema promises of time.
    _require(abs(parts_s - wall_s) <= 0.01 * wall_s, "time", fault)


def _check_bill(report: Report) -> None:
    bill = report.bill
    if not bill:
        return
    total_s = sum(stage.wall_s for stage in bill.stages) + bill.between_jobs_s - bill.overlap_s
    wall_s = bill.machine.wall_s
    fault = f"stages and pauses, minus overlap, are {total_s:.3f} s, wall_s is {wall_s:.3f} s"
    _require(abs(total_s - wall_s) <= 0.01 * wall_s, "bill.machine", fault)


def _check_worth(report: Report) -> None:
    usd = report.cost.usd
    worth = sum(finding.worth_usd or 0.0 for finding in report.findings)
    fault = f"together worth ${worth:.4f}, but the run cost ${usd}"
    _require(worth <= (usd or 0.0) * (1 + ROUNDING), "findings", fault)


def check_epochs(report: Report) -> None:
    """Check that epochs add up, and that a full one has the tokens of every packed row."""
    training, data = report.training_report.training, report.data
    epochs, started = training.epoch_summaries, n_epochs_started(training.epochs)
    fault = f"{len(epochs)} entries for {started} epochs started"
    _require(len(epochs) == started, EPOCHS, fault)
    for key, whole in (("tokens", data.trained_tokens), ("steps", training.steps)):
        total = sum(getattr(epoch, key) for epoch in epochs)
        _require(total == whole, EPOCHS, f"{key} add up to {total:,}, not to {whole:,}")
    # A finding reports it; there is nothing to compare the tokens with.
    if why_rows_differ(report) is not None:
        return
    per_epoch, useful = steps_per_epoch(report), data.useful_tokens
    cells = report.training_parameters.global_batch_sequences * data.seq_len
    for index, epoch in enumerate(epochs):
        whole, tokens = epoch.steps == per_epoch, epoch.tokens
        # Part of an epoch: at most all rows, and at most the positions of its steps.
        most = useful if whole else min(useful, epoch.steps * cells)
        fault = (
            f"{tokens:,} in {epoch.steps:,} of {per_epoch:,} steps; the packed rows have"
            f" {useful:,} and a step {cells:,} positions"
        )
        is_right = tokens <= most and not (whole and tokens != useful)
        _require(is_right, f"{EPOCHS}[{index}].tokens", fault)


def _check_plan(report: Report) -> None:
    plan, memory = report.plan, report.plan.memory
    sums: list[tuple[str, float]] = []
    # Only a calibrated plan splits its hours.
    if is_measured(plan.step_hours):
        sums.append(("hours", sum(getattr(plan, part) or 0.0 for part in PLAN_PARTS)))
    if memory:
        sums.append(("memory_peak_bytes", sum(getattr(memory, part) for part in MEMORY_PARTS)))
    for name, total in sums:
        whole = getattr(plan, name) or 0
        is_right = abs(total - whole) <= ROUNDING * max(whole, total)
        _require(is_right, f"plan.{name}", f"is {whole:.6g}, its parts are {total:.6g}")


def _check_scores(report: Report) -> None:
    evaluation = report.evaluation
    sides = {"before": evaluation.before, "after": evaluation.after}
    scores: dict[str, Scored] = {**sides}
    scores |= {f"baselines[{i}]": scored for i, scored in enumerate(evaluation.baselines)}
    candidates = enumerate(evaluation.published.candidates)
    scores |= {f"published.candidates[{i}]": scored for i, scored in candidates}
    for name, scored in scores.items():
        _check_counts(f"{PLACE}.{name}", scored)
        _check_inside(f"{PLACE}.{name}.value_fraction", scored.value_fraction, scored.ci95)
    for name, side in sides.items():
        place, n = f"{PLACE}.{name}", side.n_examples or 0
        _check_inside(f"{place}.held_out_loss", side.held_out_loss, side.held_out_loss_ci95)
        _check_inside(f"{place}.perplexity", side.perplexity, side.perplexity_ci95)
        # A cut-off answer is one of the answers.
        is_right = (side.n_cut_off or 0) <= n
        _require(is_right, f"{place}.n_cut_off", f"more than the {n} answers")


def _check_counts(place: str, scored: Scored) -> None:
    value = scored.value_fraction
    if not is_measured(value):
        return
    n, n_correct, kinds = scored.n_examples or 0, scored.n_correct or 0, scored.n_by_kind or {}
    counted, right = sum(kinds.values()), kinds.get("correct", 0)
    fault = f"{counted} verdicts, {right} correct; {n} answers, {n_correct} correct"
    _require((counted, right) == (n, n_correct), f"{place}.n_by_kind", fault)
    is_right = n > 0 and abs(value - n_correct / n) <= FRACTION_ROUNDING
    _require(is_right, f"{place}.value_fraction", f"{value} is not {n_correct} of {n}")


def _check_inside(
    place: str, value: Measured[float] | None, ci95: Measured[Interval] | None
) -> None:
    if not is_measured(value) or not ci95:
        return
    slack = FRACTION_ROUNDING * max(1.0, abs(value))
    is_inside = ci95[0] - slack <= value <= ci95[1] + slack
    _require(is_inside, place, f"{value} is outside its interval {ci95[0]} to {ci95[1]}")


def _check_changes(report: Report) -> None:
    evaluation = report.evaluation
    before, after = evaluation.before, evaluation.after
    for index, change in enumerate(evaluation.changes):
        place = f"{PLACE}.changes[{index}]"
        is_loss = change.quantity in LOSSES
        key = change.quantity if is_loss else "value_fraction"
        _check_difference(place, change, getattr(after, key), getattr(before, key))
        fault = f"{change.n}, but {after.n_examples} were asked"
        _require(is_loss or change.n == after.n_examples, f"{place}.n", fault)
    # The expert minus the baseline.
    for index, baseline in enumerate(evaluation.baselines):
        if baseline.change:
            place, value = f"{PLACE}.baselines[{index}].change", baseline.value_fraction
            _check_difference(place, baseline.change, after.value_fraction, value)
    if evaluation.earlier and evaluation.earlier.change:
        _check_word(f"{PLACE}.earlier.change", evaluation.earlier.change)


def _check_difference(
    place: str, change: PairedChange, one: Measured[float], other: Measured[float]
) -> None:
    if not is_measured(one) or not is_measured(other):
        raise DataError(f"report.json.{place}: a change of a figure that was not measured")
    is_loss = change.quantity in LOSSES
    slack = LOSS_ROUNDING * max(1.0, one, other) if is_loss else FRACTION_ROUNDING
    fault = f"{change.difference} is not {one} minus {other}"
    _require(abs(change.difference - (one - other)) <= slack, f"{place}.difference", fault)
    _check_word(place, change)


def _check_word(place: str, change: PairedChange) -> None:
    _check_inside(f"{place}.difference", change.difference, change.ci95)
    if change.change == NO_CHANGE:
        return  # with so few differing pairs, even an interval that excludes zero proves nothing
    low, high = change.ci95
    # A loss that rises is worse.
    rose, fell = (WORSE, BETTER) if change.quantity in LOSSES else (BETTER, WORSE)
    word = rose if low > 0 else fell if high < 0 else NO_CHANGE
    fault = f"{change.change!r}, but the interval says {word!r}"
    _require(change.change == word, f"{place}.change", fault)


def _check_published(report: Report) -> None:
    published, place = report.evaluation.published, f"{PLACE}.published.candidates"
    step, n_asked = published.step, published.n_questions
    candidates, exported = published.candidates, report.export.published_step
    marked = [candidate.step for candidate in candidates if candidate.published]
    fault = f"step {step} is published, but {marked} are marked"
    _require(not candidates or marked == [step], place, fault)
    for index, candidate in enumerate(candidates):
        n, is_scored = candidate.n_examples, is_measured(candidate.value_fraction)
        fault = f"{n}, not the {n_asked} that all were asked"
        _require(not is_scored or n == n_asked, f"{place}[{index}].n_examples", fault)
    fault = f"{exported}, but step {step} was evaluated; run export_model again"
    _require(exported == step, "export.published_step", fault)


def _check_judge(report: Report) -> None:
    judge = report.evaluation.judge
    if not judge:
        return
    counted = judge.n_wins + judge.n_losses + judge.n_ties
    n, n_unsure = judge.n_pairs, judge.n_inconsistent
    fault = (
        f"{counted} verdicts ({judge.n_ties} ties, {n_unsure} of them inconsistent) and"
        f" {judge.n_failed} failures for {n} pairs"
    )
    is_right = counted + judge.n_failed == n and n_unsure <= judge.n_ties
    _require(is_right, f"{PLACE}.judge", fault)
    # A tie is half a win.
    won = (judge.n_wins + judge.n_ties / 2) / counted if counted else None
    recorded, place = judge.win_fraction, f"{PLACE}.judge.win_fraction"
    is_right = is_measured(recorded) == (won is not None)
    is_right &= abs((recorded or 0.0) - (won or 0.0)) <= FRACTION_ROUNDING
    _require(is_right, place, f"{recorded}, but the verdicts give {won}")
    _check_inside(place, recorded, judge.ci95)


CHECKS = (
    _check_run, check_epochs, _check_plan, _check_scores, _check_changes,
    _check_published, _check_judge, _check_worth, _check_bill,
)  # fmt: skip


def check_against_records(report: Report, inputs: ReportInputs) -> None:
    """Compare the run with packed rows and the monitor; raise DataError if they disagree."""
    packing = inputs.packing
    rows = sha256_json([packing.train.sha256, packing.held_out.sha256])
    fault = "the run trained on different rows than packing.json lists; run train_expert again"
    _require(inputs.training.packing_sha256 == rows, "provenance.packing_sha256", fault)
    # By the run's clock, the monitor must have sampled until the last step and not beyond the end.
    # A monitor that died early proves nothing.
    if inputs.monitor.monitor_cpu_fraction is None or not (inputs.samples and inputs.steps):
        return
    time, interval_s = report.time, inputs.monitor.effective_interval_s or 0.0
    allowed_s = max(2 * interval_s, MAX_CLOCK_GAP_FRACTION * time.wall_s)
    seen_s, step_s = inputs.samples[-1].elapsed_s, inputs.steps[-1].elapsed_s
    fault = (
        f"the monitor's last reading is at {seen_s:.1f} s, the last step at {step_s:.1f} s of"
        f" {time.wall_s:.1f} s; they may be at most {allowed_s:.1f} s apart"
    )
    is_near = step_s - seen_s <= allowed_s and seen_s - time.wall_s <= allowed_s + LEAVING_S
    _require(is_near, "training_report.hardware", fault)
