"""What the jobs of an expert need: cards, machines, minutes, memory, packages, the base model.

All of it is checked before the first job starts. A dry run makes the same checks, and so ends with
the same error as the run would.
"""

import math
import os
from pathlib import Path

from expertflow.config.expert import ConfiguredExpert
from expertflow.config.guard import note
from expertflow.config.read_yaml import suggest_name
from expertflow.core.errors import ConfigError, DataError, HardwareError
from expertflow.core.records import read_part
from expertflow.data import cache
from expertflow.hardware import probe
from expertflow.hardware.records import GpuFacts
from expertflow.plan import switches
from expertflow.plan.cost import check_budgets, price_of_plan
from expertflow.plan.records import CostPlan
from expertflow.plan.settings import TrainingSection
from expertflow.plan.step_time import card_speed

TRAINS = ("calibrate_expert", "tune_expert", "ablate_variant", "train_expert")
# Without a calibration, the plan's upper end leaves out start-up, saves and evaluations, and a job
# that is stopped too early has to queue again. Requesting more time costs nothing.
GENEROUS = 1.5
AT_LEAST_MINUTES = 60
UNPLANNED_MINUTES = 24 * 60
# What the profiles give a job; in addition, four bytes per weight, and half as much for copies.
JOB_MB, UNKNOWN_MODEL_MB, EXPORT_BYTES = 8000, 64000, 6
# Cores of a job besides its card: one for its loop, one for batches and saves.
BESIDE_CARD = 2


def check_machine(expert: ConfiguredExpert, rule: str) -> None:
    """Refuse a rule that cannot run here, if this machine runs it.

    A run that only looks may plan for a card that is missing here; it only gets a note.

    Raises:
        ConfigError: a folder is missing, or the hardware is not what the settings need.
        HardwareError: a card or a package is missing.
        TrainingError: the folder of the base model does not contain one.
    """
    training, elsewhere = expert.training, expert.run.elsewhere
    if rule in TRAINS:
        count_allowed_gpus(training, expert.run.gpu_limit)
        count_nodes(training)
    spec = expert.plan_spec
    # An opened bundle has its model, or links to the weights.
    if rule in ("prepare_tokenizer", "prepare_model"):
        if expert.bundle is None:
            _check_model(expert, notes=rule == "prepare_model")
        return
    gpu = probe.resolve_gpu(spec.hardware, spec.gpu_table)
    if spec.hardware == "auto" and gpu is None and (elsewhere or rule == "make_bundle"):
        raise ConfigError(
            f"{probe.no_gpu_reason()}, and {expert.name} is trained on another one; set its card"
            " with --config hardware='H100 SXM', or use hardware=cpu"
        )
    # Both raise: varlen on a CPU, shards of 4-bit weights.
    switches.choose_attention(spec, gpu)
    switches.choose_parallel(spec)
    if rule == "plan_training":
        precision, _ = switches.choose_precision(spec, gpu)
        speed = card_speed(gpu, precision, use_tf32=spec.use_tf32)
        hours = None if isinstance(speed, str) and not expert.config["calibrate"] else 0.0
        # Whether the plan will have hours and dollars to compare with a budget, however many.
        some = price_of_plan(spec, gpu).band((hours, hours, hours), "predicted_")
        list(check_budgets(CostPlan(reason="", **some), spec))
    # Packages and cards of this machine say nothing about the one that trains.
    if elsewhere or rule not in TRAINS:
        return
    for package, remedy in switches.list_required_packages(spec):
        probe.package_version(package, remedy)
    if gpu is not None and (missing := _missing_for_card(expert, rule, gpu)):
        if not expert.run.looks:
            raise HardwareError(missing)
        note(f"{expert.name}: a run on this machine would be refused: {missing}")


def _missing_for_card(expert: ConfiguredExpert, rule: str, gpu: GpuFacts) -> str | None:
    if probe.lacks_cuda():
        return probe.NO_CUDA.format(gpu.name)
    training, spec = expert.training, expert.plan_spec
    n, n_seen = training.world_size // training.n_nodes, probe.count_gpus()
    # The others run one process.
    if rule in ("calibrate_expert", "train_expert") and n_seen is not None and n_seen < n:
        return (
            f"training.world_size is {training.world_size}, one process per card, but this"
            f" machine has {n_seen} of {n}; set it to {n_seen * training.n_nodes}, or run on a"
            " machine with more"
        )
    attention, _ = switches.choose_attention(spec, gpu)
    compiles, _ = switches.choose_compile(spec, gpu, attention=attention, packing=training.packing)
    # A tuning may find that compiling fails, and choose not to.
    if compiles and rule != "tune_expert" and training.tuned is None and probe.lacks_compiler():
        return (
            "training.torch_compile: kernels cannot be built here without a C compiler and this"
            " Python's headers; install gcc and python3-dev, or set it to false"
        )
    return None


def _check_model(expert: ConfiguredExpert, *, notes: bool) -> None:
    # Imported here: it loads tokenizers.
    from expertflow.train.model import base

    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    for key in ("model", "tokenizer"):
        place: str | None = expert.settings[key]
        if place is None:
            continue
        folder, where = Path(place).expanduser(), f"expert {expert.name}: {key} is {place!r}"
        is_cached = key == "model" and cache.repository_folder(place, "models").is_dir()
        if place.startswith("builtin:"):
            if place != base.TINY_QWEN3:
                hint = suggest_name(place, [base.TINY_QWEN3])
                raise ConfigError(f"{where}, which is not known; {hint}")
        elif folder.is_dir():
            if key == "model":
                base.read_facts(folder)
        elif is_cached:
            continue
        # A name on the hub has one slash, unless it is one of the oldest.
        elif key == "tokenizer" or place.count("/") != 1 or folder.parent.is_dir():
            others = [str(Path(place).with_name(found.name)) for found in folder.parent.glob("*/")]
            fix = "correct the path" + ", or write owner/name of the hub" * ("/" not in place)
            hint = suggest_name(place, others, fix)
            raise ConfigError(f"{where}, but there is no such folder; {hint}")
        elif is_offline:
            missing = (
                f"{where}: neither a local folder nor in the cache, and HF_HUB_OFFLINE is set;"
                " correct the name, or download it with network access"
            )
            # A forecast for a card elsewhere works without the model.
            if not expert.run.looks:
                raise ConfigError(missing)
            if notes:
                note(f"a run on this machine would be refused: {missing}")


def runtime_minutes(expert: str) -> int:
    """Return the minutes that a training may take, by its plan; a day if unplanned.

    A job that is stopped earlier saves, and a retry resumes it.
    """
    try:
        cost = read_part(CostPlan, Path("results", expert, "plan.json"), "cost")
    except DataError:
        # There is none yet, or a corrupt one, which is made again before it is used.
        return UNPLANNED_MINUTES
    hours = cost.predicted_hours_high
    return (
        UNPLANNED_MINUTES if hours is None else AT_LEAST_MINUTES + math.ceil(60 * GENEROUS * hours)
    )


def export_memory_mb(expert: str) -> int:
    """Return the memory needed to merge a model and read it back in fp32, on a CPU."""
    try:
        n_parameters = read_part(int, Path("results", expert, "model.json"), "n_parameters")
    except DataError:
        # As for card jobs in the profiles.
        return UNKNOWN_MODEL_MB
    return JOB_MB + math.ceil(n_parameters * EXPORT_BYTES / 1e6)


def count_threads(expert: ConfiguredExpert) -> int:
    """Return the cores to request for a job that trains or answers.

    Snakemake grants at most ``--cores``, and sets OMP_NUM_THREADS, which torch follows.
    """
    spec, training = expert.plan_spec, expert.training
    if expert.run.elsewhere or training.world_size > 1:
        return BESIDE_CARD
    if probe.resolve_gpu(spec.hardware, spec.gpu_table) is not None:
        return BESIDE_CARD
    return max(BESIDE_CARD, training.n_threads or probe.usable_cores())


def count_allowed_gpus(training: TrainingSection, limit: int | None) -> int:
    """Count the GPUs of all nodes together; ConfigError if a run may not use that many.

    Snakemake would silently request fewer, and the processes would share them.
    """
    n = training.world_size
    # In a dry run without a profile there is no limit.
    if limit is not None and limit < n:
        raise ConfigError(
            f"training.world_size is {n}, but a run may use {limit} at once; add --resources"
            f" gpu={n}, or with profiles/slurm set EXPERTFLOW_SLURM_GPUS to at least {n}"
        )
    return n


def count_nodes(training: TrainingSection) -> int | None:
    """Return the machine count; null for one. ConfigError if it does not divide the processes."""
    n_processes, n = training.world_size, training.n_nodes
    if n_processes % n:
        raise ConfigError(
            f"training.n_nodes is {n} and training.world_size {n_processes}, but every machine runs"
            f" the same number of processes; make world_size a multiple of {n}"
        )
    return None if n == 1 else n
