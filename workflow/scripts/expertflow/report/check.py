"""Reject a report that contradicts itself, lacks a key, or leaves a null unexplained."""

import json
import re
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.records import from_json
from expertflow.report.derive import n_epochs_started
from expertflow.report.findings.evidence import steps_per_epoch, why_rows_differ
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import restore, to_plain
from expertflow.report.records import Report

TIME_PARTS = (
    "startup_s", "data_wait_s", "h2d_s", "train_s", "checkpoint_s", "eval_s", "other_s",
)  # fmt: skip
MAX_CLOCK_GAP_FRACTION = 0.01
LEAVING_S = 5.0  # processes exit, and the monitor notices, after the run's clock was read
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
    _check_run(report)
    check_epochs(report)
    step, exported = report.evaluation.published.step, report.export.published_step
    fault = f"{exported}, but step {step} was evaluated; run export_model again"
    _require(exported == step, "export.published_step", fault)
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
