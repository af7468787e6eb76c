"""The log of steps: losses fetched from the device, checked, and written down."""

import json
import logging
import math
import time
from typing import Any

import torch
from msgspec.structs import asdict

from expertflow.core.files import read_json_lines, write_text
from expertflow.train.records import StepRecord
from expertflow.train.run import Diverged, PendingStep, Run
from expertflow.train.saved import checkpoint_files
from expertflow.train.timing import PARTS

log = logging.getLogger(__name__)
STEPS_FILE = "steps.jsonl"
# A loss this many times that of guessing, or that of the first step, is an explosion.
EXPLODED = 2.0
SHOWN_ROWS = 16


def flush(run: Run) -> None:
    """Fetch the losses that wait on the device, check them, and append them to steps.jsonl.

    Raises:
        Diverged: a loss or a gradient norm is not finite, or the loss has exploded.
    """
    if not run.pending:
        return
    pending, run.pending = run.pending, []
    with run.clock.part("steps"):
        fetched = _fetched(run, pending)
    _set_times(run, pending)
    records = [_record(step, *values) for step, values in fetched]
    for record in records:
        _check(run, record)
        _book(run, record)
    if not run.processes.is_first:
        return
    kept = [record for record in records if _is_kept(run, record)]
    with (run.state / STEPS_FILE).open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(asdict(record)) + "\n" for record in kept)
    _tell(run, records)


def _is_kept(run: Run, record: StepRecord) -> bool:
    """Keep every step, or one line for each logging interval and the last."""
    plan = run.plan
    due = record.step % plan.logging_steps == 0 or record.step == plan.n_steps
    return plan.track_per_step_metrics or due


def cut(run: Run) -> None:
    """Take from steps.jsonl what came after the state that the run goes on from."""
    path = run.state / STEPS_FILE
    if run.processes.is_first and path.is_file():
        done = [line for line in read_json_lines(path) if line["step"] <= run.progress.step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in done))
        n_lost = run.progress.step - len(done)
        if run.plan.track_per_step_metrics and n_lost > 0:
            log.warning("%s: %d steps are missing; the weights are not touched by it", path, n_lost)


def _fetched(run: Run, pending: list[PendingStep]) -> list[tuple[PendingStep, tuple[float, float]]]:
    """Wait for the device once; add up what the processes have of the losses and of padding."""
    shares = torch.stack([step.loss for step in pending]).double()
    padding = shares.new_tensor([step.n_padding for step in pending])
    norms = torch.stack([step.grad_norm for step in pending]).tolist()
    losses, n_padding = run.processes.add_up(torch.stack((shares, padding))).tolist()
    run.progress.n_padding += round(sum(n_padding))
    return list(zip(pending, zip(losses, norms, strict=True), strict=True))


def _set_times(run: Run, pending: list[PendingStep]) -> None:
    """Give steps their share of the time since the last fetch, where the device runs behind.

    The host's own times are how long it took to ask for a step, not to do it.
    """
    now_s = time.perf_counter()
    if run.device.type == "cuda":
        share_s, end_s = (now_s - run.fetched_at_s) / len(pending), run.clock.wall_s
        for i, step in enumerate(reversed(pending)):
            step.line |= {"step_s": share_s, "elapsed_s": end_s - i * share_s}
    run.fetched_at_s = now_s


def _record(step: PendingStep, loss: float, grad_norm: float) -> StepRecord:
    parts = step.parts() if step.parts else {}
    return StepRecord(
        **step.line,
        loss=loss,
        grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        h2d_s=parts.get("h2d"),
        forward_s=parts.get("forward"),
        backward_s=parts.get("backward"),
        optimizer_s=parts.get("optimizer"),
    )


def _check(run: Run, record: StepRecord) -> None:
    """Stop a run whose loss says that it learns nothing any more."""
    # A loss scaler skips steps whose gradients overflow; that is its way of finding its scale.
    # Below 1 it has found none, and would skip steps until the end.
    scaler = run.processes.accelerator.scaler
    skipped = record.grad_norm is None and scaler is not None and scaler.get_scale() >= 1
    limit = _limit(run, record)
    if math.isfinite(record.loss) and record.loss <= limit:
        if record.grad_norm is not None or skipped:
            return
        problem = f"its loss is {record.loss:.4g} and its gradient norm is not finite"
    elif math.isfinite(record.loss):
        problem = f"its loss is {record.loss:.4g} nats a token, above max_loss {limit:.4g}"
    else:
        problem = f"its loss is {record.loss}"
    rows = run.feed.order.rows_of_step(record.step - 1).tolist()
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (" ..." if len(rows) > SHOWN_ROWS else "")
    run.saver.wait()
    good = checkpoint_files.newest(run.state) or "the start"
    raise Diverged(
        f"step {record.step} diverged: {problem}; its rows are {shown}; the last good state is"
        f" {good}; lower training.learning_rate ({run.plan.learning_rate:g}) or check the data"
    )


def _limit(run: Run, record: StepRecord) -> float:
    """Give the loss in nats a token above which a run has exploded."""
    if run.plan.max_loss is not None:
        return run.plan.max_loss
    first = record.loss if record.step == 1 else run.progress.loss_first
    return EXPLODED * max(math.log(run.net.config.get_text_config().vocab_size), first)


def _book(run: Run, record: StepRecord) -> None:
    """Add a step to its epoch: steps, sum of losses, tokens, seconds; and the parts, if timed."""
    progress = run.progress
    if record.step == 1:
        progress.loss_first = record.loss
    progress.loss_last = record.loss
    epoch = str((record.step - 1) // run.plan.n_steps_per_epoch)
    sums = progress.epochs.setdefault(epoch, [0.0] * 4)
    for i, value in enumerate((1, record.loss, record.n_tokens, record.step_s)):
        sums[i] += value
    if record.forward_s is not None:
        sampled = progress.sampled
        sampled["steps"] = sampled.get("steps", 0.0) + 1
        for name in PARTS:
            sampled[name] = sampled.get(name, 0.0) + getattr(record, f"{name}_s")


def _tell(run: Run, records: list[StepRecord]) -> None:
    """Say how far the run is, how fast, how long it takes yet, and what it has cost."""
    last, plan = records[-1], run.plan
    mean_s = sum(record.step_s for record in records) / len(records)
    values: dict[str, Any] = {
        "loss": last.loss,
        "learning_rate": last.learning_rate,
        "tokens_per_s": sum(record.n_tokens for record in records) / (mean_s * len(records)),
        "remaining_s": mean_s * (plan.n_steps - last.step),
    }
    price = plan.cost.price_usd_per_hour
    if price is not None:
        values["usd_so_far"] = run.clock.wall_s / 3600 * price
    if plan.report_to != "none":
        run.processes.accelerator.log(values, step=last.step)
    bar = run.bar
    line = progress_line(last.step, plan.n_steps, values)
    if bar is not None:
        bar.update(last.step - bar.n)
        bar.set_postfix_str(line.split(" ", 2)[2])
    else:
        log.info("%s", line)


def progress_line(step: int, n_steps: int, values: dict[str, Any]) -> str:
    """Give one line: ``step 40/200 loss 1.2345 lr 2.00e-04 28,012 tokens/s 0:03:10 left $0.12``."""
    minutes, seconds = divmod(round(values["remaining_s"]), 60)
    hours, minutes = divmod(minutes, 60)
    line = (
        f"step {step}/{n_steps} loss {values['loss']:.4f} lr {values['learning_rate']:.2e}"
        f" {values['tokens_per_s']:,.0f} tokens/s {hours}:{minutes:02}:{seconds:02} left"
    )
    spent = values.get("usd_so_far")
    return line if spent is None else f"{line} ${spent:.2f} so far"
