"""After a step: log, evaluate, save, stop."""

import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from msgspec.structs import asdict

from expertflow.core.errors import Interrupted
from expertflow.core.files import read_json_lines, write_text
from expertflow.core.progress import show_activity
from expertflow.core.records import to_json
from expertflow.train.memory import memory_advice
from expertflow.train.model.packed import compute_held_out_loss
from expertflow.train.model.self_check import NOT_FINITE_FIX
from expertflow.train.model.weights import Diverged
from expertflow.train.records import EvalPoint, SavePoint, StepRecord
from expertflow.train.run import TrainingRun
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.timing import PARTS

log = logging.getLogger(__name__)
STEPS_FILE = "steps.jsonl"
# A loss this many times that of guessing, or that of the first step, has exploded.
EXPLODED = 2.0
SHOWN_ROWS = 16


def after_step(run: TrainingRun) -> None:
    """Log, evaluate and save as scheduled; after a signal, stop once the state is saved."""
    plan, progress = run.plan, run.progress
    improved = False
    if progress.step % plan.logging_steps == 0 or run.is_over:
        flush_steps(run)
    if is_evaluation_due(run):
        with suppress(Interrupted):
            improved = evaluate_held_out(run)
    overdue = run.clock.wall_s - run.saved_at_s > plan.save_every_minutes * 60
    told, overdue = run.processes.any_of(run.stop(), overdue)
    wanted = told or overdue or (improved and plan.load_best_model_at_end)
    if wanted or run.is_over or progress.step % plan.save_steps == 0:
        save_checkpoint(run)
    if told and (is_evaluation_due(run) or not run.is_over):
        # An evaluation that the signal interrupted is still due: the next session begins with it.
        run.saver.wait()
        raise Interrupted(f"stopped after step {progress.step}")


def is_evaluation_due(run: TrainingRun) -> bool:
    step = run.progress.step
    is_measured = any(point.step == step for point in run.progress.eval_points)
    return not is_measured and (step % run.plan.eval_steps == 0 or run.is_over)


def evaluate_held_out(run: TrainingRun) -> bool:
    """Measure the held-out loss; return whether it is the lowest so far.

    Raises Interrupted in all processes once any of them receives a signal.
    """
    flush_steps(run)
    plan, progress, processes = run.plan, run.progress, run.processes

    def stop_if_signaled() -> None:
        # A preempted machine leaves time to save, but perhaps not for all rows.
        if processes.any_of(run.stop())[0]:
            raise Interrupted(f"stopped during the held-out loss after step {progress.step}")

    start, best = time.perf_counter(), progress.best
    scope = memory_advice(plan, run.device)
    what = show_activity(lambda: f"held-out loss after step {progress.step}")
    run.loss.eval()
    try:
        with what, run.clock.part("eval"), scope, processes.accelerator.autocast():
            loss, n_targets = compute_held_out_loss(
                run.loss,
                run.held_out,
                micro_batch_size=plan.batch_size,
                world_size=processes.world_size,
                rank=processes.rank,
                add_up=processes.add_up,
                before_batch=stop_if_signaled,
            )
    finally:
        run.loss.train()
        if hasattr(run.loss, "reshard"):
            # Free the full parameters left gathered by a forward pass without a backward one.
            run.loss.reshard()
    if not math.isfinite(loss):
        fix = (
            f"lower training.learning_rate ({plan.learning_rate:g}); earlier checkpoints are in"
            f" {run.state}"
        )
        if progress.step == 0:
            # Nothing was trained yet.
            fix = f"the model itself fails in {plan.precision}; {NOT_FINITE_FIX}"
        raise Diverged(f"the held-out loss after step {progress.step} is {loss}; {fix}")
    run.fetched_at_s = time.perf_counter()
    seconds = run.fetched_at_s - start
    point = EvalPoint(step=progress.step, loss=loss, n_target_tokens=n_targets, eval_s=seconds)
    progress.eval_points += (point,)
    log.info("held-out loss %.4f after step %d", loss, progress.step)
    processes.accelerator.log({"held_out_loss": loss}, step=progress.step)
    if out_of_patience(progress.eval_points, plan.patience, plan.min_delta) and not run.is_over:
        progress.stopped_early_at_step = progress.step
        log.info(
            "stopped early: %d evaluations in a row did not improve by %g", plan.patience,
            plan.min_delta,
        )  # fmt: skip
    return best is None or loss < best.loss


def out_of_patience(points: Sequence[EvalPoint], patience: int | None, min_delta: float) -> bool:
    """Return whether the last ``patience`` evaluations brought no improvement.

    An evaluation lower than the lowest so far by at least ``min_delta`` restarts the count.
    """
    if patience is None:
        return False
    # Losses 3.0, 2.9, 2.95, 2.89 with min_delta 0.05 wait 0, 0, 1, 2 evaluations.
    lowest, waited = math.inf, 0
    for point in points:
        improved = point.loss < lowest and point.loss <= lowest - min_delta
        waited = 0 if improved else waited + 1
        lowest = point.loss if improved else lowest
    return waited >= patience


def save_checkpoint(run: TrainingRun) -> None:
    flush_steps(run)
    start, elapsed_s = time.perf_counter(), run.clock.wall_s
    scope = memory_advice(run.plan, run.device, saved_step=run.progress.step)
    with run.clock.part("checkpoint"), scope:
        # One snapshot at a time: two would take twice the host memory.
        run.saver.wait()
        run.progress.n_saves += 1
        run.progress.note_device(run.device)
        losses = {point.step: point.loss for point in run.progress.eval_points}
        saved = {
            **to_json(run.progress),
            # Null unless exactly these weights were evaluated.
            "held_out_loss": losses.get(run.progress.step),
            "clock": run.clock.totals(),
            "seed": run.plan.seed,
            "run": run.state.name,
            "order_sha256": run.feed.order.sha256_of_step(run.progress.step),
        }
        snapshot = checkpoint.take_snapshot(
            model=run.net,
            optimizer=run.optimizer,
            scaler=run.processes.accelerator.scaler,
            progress=saved,
        )
        if snapshot is not None:
            run.saver.submit(snapshot)
    run.saved_at_s, run.fetched_at_s = run.clock.wall_s, time.perf_counter()
    save_s = run.fetched_at_s - start
    point = SavePoint(step=run.progress.step, elapsed_s=elapsed_s, save_s=save_s)
    run.progress.save_points += (point,)


def flush_steps(run: TrainingRun) -> None:
    """Fetch pending losses from the device, check them, and append them to steps.jsonl."""
    if not run.pending:
        return
    pending, run.pending = run.pending, []
    with run.clock.part("steps"):
        # A single wait for the device.
        shares = torch.stack([step.loss for step in pending]).double()
        padding = shares.new_tensor([step.n_padding for step in pending])
        norms = torch.stack([step.grad_norm for step in pending]).tolist()
        # A process knows only its share of the loss; the norm is of all processes' gradients.
        losses, n_padding = run.processes.add_up(torch.stack((shares, padding))).tolist()
    run.progress.n_padding_tokens += round(sum(n_padding))
    now_s = time.perf_counter()
    if run.device.type == "cuda":
        # The device runs behind: steps share the time since the last fetch. The host's own times
        # show how long it took to queue a step, not to run it.
        share_s, end_s = (now_s - run.fetched_at_s) / len(pending), run.clock.wall_s
        for i, step in enumerate(reversed(pending)):
            step.line |= {"step_s": share_s, "elapsed_s": end_s - i * share_s}
    run.fetched_at_s = now_s
    records = []
    for step, loss, norm in zip(pending, losses, norms, strict=True):
        parts: dict[str, Any] = step.parts() if step.parts else dict.fromkeys(PARTS)
        record = StepRecord(
            **step.line,
            loss=loss,
            grad_norm=norm if math.isfinite(norm) else None,
            **{f"{name}_s": seconds for name, seconds in parts.items()},
        )
        records.append(record)
        _check(run, record)
        _book(run, record)
    # All processes checked the losses, so that all of them stop at a diverged one.
    if not run.processes.is_first:
        return
    plan = run.plan
    with (run.state / STEPS_FILE).open("a", encoding="utf-8") as stream:
        for record in records:
            due = record.step % plan.logging_steps == 0 or record.step == plan.n_steps
            if plan.track_per_step_metrics or due:
                stream.write(json.dumps(asdict(record)) + "\n")
    _report_progress(run, records)


def truncate_log(run: TrainingRun) -> None:
    path = run.state / STEPS_FILE
    if run.processes.is_first:
        # A damaged file was already removed.
        lines = read_json_lines(path) if path.is_file() else []
        done = [line for line in lines if line["step"] <= run.progress.step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in done))
        n_lost = run.progress.step - len(done)
        if run.plan.track_per_step_metrics and n_lost > 0:
            log.warning("%s: %d steps are missing; the weights are not affected", path, n_lost)


def _check(run: TrainingRun, record: StepRecord) -> None:
    # A loss scaler skips steps whose gradients overflow, in order to find its scale. Below 1 it has
    # found none, and would skip steps until the end.
    scaler = run.processes.accelerator.scaler
    skipped = record.grad_norm is None and scaler is not None and scaler.get_scale() >= 1
    limit = run.plan.max_loss
    if limit is None:
        first = record.loss if record.step == 1 else run.progress.loss_first
        limit = EXPLODED * max(math.log(run.net.config.get_text_config().vocab_size), first)
    if math.isfinite(record.loss) and record.loss <= limit:
        # Weights too large for the arithmetic: all tokens are equally likely, and stay so.
        is_stuck = record.grad_norm == 0 and record.loss > 0
        if not is_stuck and (record.grad_norm is not None or skipped):
            return
        norm = "0: nothing more would be learned" if is_stuck else "not finite"
        problem = f"its loss is {record.loss:.4g} and its gradient norm is {norm}"
    elif math.isfinite(record.loss):
        problem = f"its loss is {record.loss:.4g} nats per token, above max_loss {limit:.4g}"
    else:
        problem = f"its loss is {record.loss}"
    rows = run.feed.order.rows_of_step(record.step - 1).tolist()
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (" ..." if len(rows) > SHOWN_ROWS else "")
    # The checkpoint being written may be the last good one.
    run.saver.wait()
    good = checkpoint_files.newest_checkpoint(run.state) or "the start"
    raise Diverged(
        f"step {record.step} diverged: {problem}; its rows are {shown}; the last good state is"
        f" {good}; lower training.learning_rate ({run.plan.learning_rate:g}) or check the data"
    )


def _book(run: TrainingRun, record: StepRecord) -> None:
    progress = run.progress
    if record.step == 1:
        progress.loss_first = record.loss
    progress.loss_last = record.loss
    # A string, as keys of JSON objects are: a resumed run must find the same key.
    epoch = str((record.step - 1) // run.plan.n_steps_per_epoch)
    sums = progress.epochs.setdefault(epoch, [0.0] * 4)
    for i, value in enumerate((1, record.loss, record.n_tokens, record.step_s)):
        sums[i] += value
    if record.forward_s is not None:
        sampled = progress.sampled
        sampled["steps"] = sampled.get("steps", 0.0) + 1
        for name in PARTS:
            sampled[name] = sampled.get(name, 0.0) + getattr(record, f"{name}_s")


def _report_progress(run: TrainingRun, records: list[StepRecord]) -> None:
    last, plan = records[-1], run.plan
    mean_s = sum(record.step_s for record in records) / len(records)
    values: dict[str, Any] = {
        "loss": last.loss,
        "learning_rate": last.learning_rate,
        "tokens_per_s": sum(record.n_tokens for record in records) / (mean_s * len(records)),
        "remaining_s": mean_s * (plan.n_steps - last.step),
    }
    left = timedelta(seconds=round(values["remaining_s"]))
    line = (
        f"loss {last.loss:.4f} lr {last.learning_rate:.2e} {values['tokens_per_s']:,.0f} tokens/s"
        f" {left} left"
    )
    if (price := plan.cost.price_usd_per_hour) is not None:
        values["usd_so_far"] = run.clock.wall_s / 3600 * price
        line += f" ${values['usd_so_far']:.2f} so far"
    run.processes.accelerator.log(values, step=last.step)
    if run.bar is not None:
        run.bar.update(last.step - run.bar.n)
        run.bar.set_postfix_str(line)
    else:
        log.info("step %d/%d %s", last.step, plan.n_steps, line)
