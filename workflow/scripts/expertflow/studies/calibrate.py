"""Time a few steps of a plan in the real training job, whose weights are discarded.

Ten warm-up steps, thirty timed ones, one save and two evaluations. Only the second evaluation
counts, since the first includes one-time costs.
"""

import math
import os
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from expertflow.core.files import read_json_lines
from expertflow.core.records import fill_record, read_record, write_record
from expertflow.plan.records import CALIBRATION_STEPS, Calibration, TrainPlan
from expertflow.plan.tuned import calibration_key
from expertflow.staging.content import read_content
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.studies.plan_expert import CalibrationJob, card_names, check_card, plan_expert
from expertflow.studies.subprocess_runner import scratch_folder
from expertflow.train.job import TrainingJob, run_job
from expertflow.train.memory_trace import import_code
from expertflow.train.processes import RANK
from expertflow.train.records import ModelRecord, StepRecord, TrainingRecord

N_WARMUP = 10
# If this many epochs fit into the timed steps, epochs are timed: their last steps are shorter.
EPOCHS_TIMED = 4


def calibrate(job: CalibrationJob) -> Calibration | None:
    """Plan, run and time; return null in a helper process of a multi-process plan.

    Raises TrainingError or HardwareError if it fails or runs on another card, Interrupted on a
    signal.
    """
    model = read_record(ModelRecord, job.model)
    # Tracing and training both need it, and neither should be timed with it.
    import_code(Path(model.path), adapter=job.spec.lora is not None)
    began_s = time.perf_counter()
    plan = plan_expert(job, tuning=job.tuning)
    gpu = plan.gpu
    if gpu is not None and RANK not in os.environ:
        for name in card_names()[: plan.world_size]:
            check_card(gpu, name, "calibration")
    with scratch_folder(job.scratch):
        short, n_warmup = shorten_plan(plan)
        training = fill_record(
            TrainingJob,
            job,
            plan=job.scratch / "plan.json",
            staging=job.scratch / "staging.json",
            state=job.scratch / "state",
            checkpoint=job.scratch / "checkpoint",
            output=job.scratch / "training.json",
            code=f"calibration {job.code}",
        )
        if RANK not in os.environ:
            write_record(training.plan, short)
            staging = plan_staging(
                expert=short.expert,
                spec=StageSpec(scratch=None),
                rows=read_content("rows", job.rows, ""),
                weights=read_content("weights", Path(model.path), ""),
            )
            write_record(training.staging, staging)
        planning_s = time.perf_counter() - began_s
        if not run_job(training):  # a helper process: only rank 0 has a record
            return None
        record = read_record(TrainingRecord, training.output)
        lines = read_json_lines(job.scratch / "steps.jsonl")
        if gpu is not None:
            # The run's monitor may know a name that the driver could not report before.
            check_card(gpu, record.gpu_name, "calibration")
        return take_times(
            plan,
            record,
            [StepRecord(**line) for line in lines],
            n_warmup=n_warmup,
            n_window_steps=1 if gpu is None else short.logging_steps,
            planning_s=planning_s,
            # Tells a later plan whether these times apply to it.
            key=calibration_key(plan, model.facts.model_type),
        )


def shorten_plan(plan: TrainPlan) -> tuple[TrainPlan, int]:
    n_steps = min(CALIBRATION_STEPS, plan.n_steps)
    n_warmup = min(N_WARMUP, n_steps // 4)
    # The warm-up must fit into the short run; learning rates do not change a step's time.
    rate_warmup = min(plan.n_warmup_steps, n_steps - 1)
    return replace(
        plan,
        n_steps=n_steps,
        n_epochs=n_steps / plan.n_steps_per_epoch,
        n_warmup_steps=rate_warmup,
        n_decay_steps=min(plan.n_decay_steps, n_steps - rate_warmup),
        save_steps=n_steps,
        # A time-triggered save among the timed steps would be counted twice.
        save_every_minutes=1e9,
        save_total_limit=1,
        eval_steps=n_steps,
        load_best_model_at_end=False,
        patience=None,
        min_delta=0.0,
        # On a card, steps between two log lines share a mean time: timed ones begin a new window.
        logging_steps=next(n for n in range(max(1, n_warmup // 2), 0, -1) if n_warmup % n == 0),
        track_per_step_metrics=True,
        report_to="none",
        profile_steps=0,
    ), n_warmup


def take_times(
    plan: TrainPlan,
    record: TrainingRecord,
    steps: list[StepRecord],
    *,
    n_warmup: int,
    n_window_steps: int,
    planning_s: float,
    key: str,
) -> Calibration:
    """Split up the times of a short run.

    ``n_window_steps`` steps share a time: on a card, those between two log lines.
    """
    timed = steps[n_warmup:]
    # From the end of one step to that of the next, including logging.
    between = np.diff([step.elapsed_s for step in steps])
    seconds = np.concatenate(([steps[0].step_s], between))[n_warmup:]
    level = step_levels(seconds, per_epoch=plan.n_steps_per_epoch)
    low, middle, high = (float(q) for q in np.quantile(level, (0.25, 0.5, 0.75)))
    save_s = sum(point.save_s for point in record.save_points) / len(record.save_points)
    eval_s = record.eval_points[-1].eval_s
    # A run's clock starts with its process, which here made a plan first.
    rest = record.time.wall_s - planning_s - float(seconds.sum()) - n_warmup * middle
    rest -= save_s * len(record.save_points) + eval_s * len(record.eval_points)
    return Calibration(
        expert=plan.expert,
        hardware=plan.hardware,
        key=key,
        n_timed_steps=len(timed),
        n_timings=min(len(level), math.ceil(len(timed) / n_window_steps)),  # independent ones
        step_s=middle,
        step_s_low=low,
        step_s_high=high,
        step_s_mean=float(seconds.mean()),
        save_s=save_s,
        eval_s=eval_s,
        startup_s=max(0.0, rest),
    )


def step_levels(seconds: NDArray[np.float64], *, per_epoch: int) -> NDArray[np.float64]:
    """Return step times, or means of short epochs, whose last step may have fewer rows."""
    n_epochs = len(seconds) // per_epoch
    if n_epochs < EPOCHS_TIMED:
        return seconds
    whole = seconds[-n_epochs * per_epoch :].reshape(n_epochs, per_epoch)
    means: NDArray[np.float64] = whole.mean(axis=1)
    return means
