"""Compile a run's layers with its first batch, and report what was compiled."""

import logging

from expertflow.core.errors import single_line
from expertflow.train.memory import try_batches
from expertflow.train.model.compiled import FAILURES, describe_compilation
from expertflow.train.records import Fallback
from expertflow.train.run import TrainingRun
from expertflow.train.start import warn_of

log = logging.getLogger(__name__)


def try_to_compile(run: TrainingRun) -> None:
    """Run the next micro-batch and discard it; if compiling fails, continue uncompiled."""
    if run.route.used["compilation"] == "off":
        return
    collator, _ = run.feed.step_rows(run.progress.step)
    batch = collator.batch(run.feed.micro_batches(run.progress.step)[0])
    reason = None
    try:
        try_batches(run, iter([batch]))
    except FAILURES as error:
        reason = single_line(error, 300)
        run.optimizer.zero_grad(set_to_none=True)
    [failed] = run.processes.any_of(reason is not None)
    if failed:
        run.route.use("compilation", "off")
        fallback = Fallback(
            part="compilation",
            planned="on",
            used="off",
            reason=f"it fails: {reason}" if reason else "it fails in another process",
            after_step=run.progress.step,
        )
        run.progress.fallbacks += (fallback,)
        warn_of(fallback)


def note_compilation(run: TrainingRun) -> None:
    """Add what was compiled to the run's activated features; call after the first step."""
    if run.plan.torch_compile:
        run.activated += (f"{describe_compilation()}, by the end of step {run.progress.step}",)
        log.info("%s", run.activated[-1])
