"""Resources that a training requests from a cluster: time, machines, and GPUs."""

import math
import shutil
from pathlib import Path
from typing import Any

from expertflow.config.guard import fail
from expertflow.core.errors import ConfigError, DataError
from expertflow.core.records import read_part
from expertflow.plan.records import CostPlan
from expertflow.plan.settings import TrainingSection

# The plan's upper end leaves out start-up, saves and evaluations where nothing was calibrated, and
# a job that is ended too early is queued for again. A job asked for longer costs nothing more.
GENEROUS = 1.5
AT_LEAST_MINUTES = 60
UNPLANNED_MINUTES = 24 * 60


def runtime_minutes(expert: str) -> int:
    """Return the minutes that a training may take, by its plan; a day if unplanned.

    A job that is ended earlier saves, and a retry resumes it.
    """
    try:
        cost = read_part(CostPlan, Path("results", expert, "plan.json"), "cost")
    except DataError:
        # There is none yet, or a spoilt one, which is made again before anything trains by it.
        return UNPLANNED_MINUTES
    hours = cost.predicted_hours_high
    return (
        UNPLANNED_MINUTES if hours is None else AT_LEAST_MINUTES + math.ceil(60 * GENEROUS * hours)
    )


def n_gpus(training: TrainingSection, limit: Any) -> int:
    """Count the GPUs of all nodes together; ConfigError if a run may not use as many.

    Snakemake would silently request fewer, and the processes would share them.
    """
    n = training.world_size
    # In a dry run without a profile there is no limit.
    if limit is not None and limit.value is not None and limit.value < n:
        raise ConfigError(
            f"training.world_size is {n}, and a run may hold {limit.value} at once: set"
            f" EXPERTFLOW_SLURM_GPUS to at least {n}, or add --resources gpu={n}"
        )
    return n


def n_nodes(training: TrainingSection) -> int | None:
    """Return the machine count; null for one. ConfigError if it does not divide the processes."""
    n_processes, n = training.world_size, training.n_nodes
    if n_processes % n:
        raise ConfigError(
            f"training.n_nodes is {n} and training.world_size {n_processes}: every machine runs as"
            f" many processes as the next; make world_size a multiple of {n}"
        )
    return None if n == 1 else n


def refuse_missing_slurm(executor: str) -> None:
    if executor == "slurm" and shutil.which("sbatch") is None:
        fail(
            "profiles/slurm submits with sbatch, which is not found here; run Snakemake on a login"
            " node of the cluster, or leave the profile out"
        )
