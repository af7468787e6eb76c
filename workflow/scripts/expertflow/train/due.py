"""What is due after a step: a log line, an evaluation, a checkpoint, a stop."""

import logging
import math
import time

from expertflow.core.errors import Interrupted
from expertflow.train.heldout import held_out_loss
from expertflow.train.memory import memory_advice
from expertflow.train.processes import settle
from expertflow.train.records import EvalPoint, SavePoint
from expertflow.train.run import Diverged, Run
from expertflow.train.saved import checkpoint
from expertflow.train.step_log import flush

log = logging.getLogger(__name__)


def after_step(run: Run) -> None:
    """Do what is due; the last step is logged, evaluated and saved in any case.

    Raises:
        Interrupted: a signal came; the state was saved first.
    """
    plan, progress = run.plan, run.progress
    improved = False
    if progress.step % plan.logging_steps == 0 or run.is_over:
        flush(run)
    if progress.step % plan.eval_steps == 0 or run.is_over:
        improved = evaluate(run)
    overdue = run.clock.wall_s - run.saved_at_s > plan.save_every_minutes * 60
    told, overdue = run.processes.any_of(run.stop(), overdue)
    wanted = told or overdue or (improved and plan.load_best_model_at_end)
    if wanted or run.is_over or progress.step % plan.save_steps == 0:
        save(run)
    if told and not run.is_over:
        run.saver.wait()
        raise Interrupted(f"stopped after step {progress.step}")


def evaluate(run: Run) -> bool:
    """Measure the held-out loss; tell whether it is the lowest so far.

    Raises:
        Diverged: it is not finite.
    """
    flush(run)
    plan, progress, processes = run.plan, run.progress, run.processes
    start, best = time.perf_counter(), progress.best
    scope = memory_advice(plan, run.device)
    with run.clock.part("eval"), scope, processes.accelerator.autocast():
        loss, n_targets = held_out_loss(
            run.loss,
            run.held_out,
            micro_batch_size=plan.batch_size,
            world_size=processes.world_size,
            rank=processes.rank,
            add_up=processes.add_up,
        )
    settle(run.loss)
    if not math.isfinite(loss):
        raise Diverged(
            f"the held-out loss after step {progress.step} is {loss}; lower"
            f" training.learning_rate ({plan.learning_rate:g}); earlier checkpoints are in"
            f" {run.state}"
        )
    run.fetched_at_s = time.perf_counter()
    seconds = run.fetched_at_s - start
    progress.eval_points.append(
        EvalPoint(step=progress.step, loss=loss, n_target_tokens=n_targets, eval_s=seconds)
    )
    log.info("held-out loss %.4f after step %d", loss, progress.step)
    if out_of_patience(progress.eval_points, plan.patience, plan.min_delta) and not run.is_over:
        progress.stopped_early_at = progress.step
        log.info(
            "stopped early: %d evaluations in a row were not lower by %g", plan.patience,
            plan.min_delta,
        )  # fmt: skip
    return best is None or loss < best.loss


def out_of_patience(points: list[EvalPoint], patience: int | None, min_delta: float) -> bool:
    """Tell whether the last ``patience`` evaluations brought nothing.

    Each that is lower than the lowest before it by ``min_delta`` or more begins the count again.
    """
    if patience is None:
        return False
    lowest, waited = math.inf, 0
    for point in points:
        improved = point.loss < lowest and point.loss <= lowest - min_delta
        waited = 0 if improved else waited + 1
        lowest = point.loss if improved else lowest
    return waited >= patience


def save(run: Run) -> None:
    """Take a checkpoint of the current step; it is written while training goes on."""
    flush(run)
    start, elapsed_s = time.perf_counter(), run.clock.wall_s
    with run.clock.part("checkpoint"):
        # One snapshot at a time: two would be twice the host memory.
        run.saver.wait()
        run.progress.n_saves += 1
        saved = {
            **run.progress.saved(),
            "clock": run.clock.totals(),
            "seed": run.plan.seed,
            "run": run.state.name,
            "order_sha256": run.feed.order.sha256_of_step(run.progress.step),
        }
        try:
            snapshot = checkpoint.take(
                model=run.net,
                optimizer=run.optimizer,
                scaler=run.processes.accelerator.scaler,
                progress=saved,
            )
        except checkpoint.NotFinite as error:
            raise Diverged(str(error)) from error
        if run.processes.is_first:
            run.saver.submit(snapshot)
    run.saved_at_s, run.fetched_at_s = run.clock.wall_s, time.perf_counter()
    run.progress.save_points.append(
        SavePoint(step=run.progress.step, elapsed_s=elapsed_s, save_s=run.fetched_at_s - start)
    )
