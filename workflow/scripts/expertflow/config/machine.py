"""What the jobs of an expert need of this machine, looked for before the first of them starts.

A dry run asks the same, and so ends with the line that the run would end with.
"""

import os
from pathlib import Path

from expertflow.config.expert import Expert
from expertflow.config.guard import note
from expertflow.config.read_yaml import suggest
from expertflow.core.errors import ConfigError, HardwareError
from expertflow.data import cache
from expertflow.hardware import probe
from expertflow.plan.switches import choose_attention, choose_parallel, needed_packages

TRAINS = ("calibrate_expert", "tune_expert", "ablate_variant", "train_expert")


def check_machine(expert: Expert, rule: str, *, elsewhere: bool) -> None:
    """Refuse a rule that could not run here; ``elsewhere``: another machine runs it.

    A run that only looks may plan for a card that is not here, and is told so.

    Raises:
        ConfigError: a folder is missing, or the hardware is not what the settings need.
        HardwareError: a card or a package is missing.
        TrainingError: the folder of the base model does not hold one.
    """
    spec = expert.plan_spec
    if rule in ("prepare_tokenizer", "prepare_model"):
        if expert.bundle is None:
            _check_model(expert, notes=rule == "prepare_model")
        return
    gpu = probe.resolve_gpu(spec.hardware, list(spec.gpu_table))
    if spec.hardware == "auto" and gpu is None and (elsewhere or rule == "make_bundle"):
        raise ConfigError(
            f"{probe.missing_gpu()}, and {expert.name} is trained on another one; name its card"
            " with --config hardware='H100 SXM', or use hardware=cpu"
        )
    choose_attention(spec, gpu)
    choose_parallel(spec)
    if elsewhere or rule not in TRAINS:
        return
    for package, remedy in needed_packages(spec):
        probe.package_version(package, remedy)
    if gpu is not None and probe.lacks_cuda():
        if not expert.setup.looks:
            raise HardwareError(probe.NO_CUDA.format(gpu.name))
        note(f"{expert.name}: a run on this machine is refused: {probe.NO_CUDA.format(gpu.name)}")


def _check_model(expert: Expert, *, notes: bool) -> None:
    # Imported here: it brings tokenizers along.
    from expertflow.train.model import base

    for key in ("model", "tokenizer"):
        place: str | None = expert.settings[key]
        if place is None:
            continue
        folder, where = Path(place).expanduser(), f"expert {expert.name}: {key} is {place!r}"
        if place.startswith("builtin:"):
            if place != base.TINY_QWEN3:
                hint = suggest(place, [base.TINY_QWEN3])
                raise ConfigError(f"{where}, which is not known; {hint}")
        elif folder.is_dir():
            if key == "model":
                base.read_facts(folder)
        # A name of the hub has one slash.
        elif key == "tokenizer" or place.count("/") != 1 or folder.parent.is_dir():
            beside = [str(Path(place).with_name(found.name)) for found in folder.parent.glob("*/")]
            hint = suggest(place, beside, "correct the path")
            raise ConfigError(f"{where}, and there is no such folder; {hint}")
        elif _is_offline() and not (cache.hub_cache() / _cache_name(place)).is_dir():
            missing = (
                f"{where}: neither a folder here nor in the cache, and HF_HUB_OFFLINE is set;"
                " correct the name, or download it where there is a network"
            )
            # What a card elsewhere would take can be asked without the model.
            if not expert.setup.looks:
                raise ConfigError(missing)
            if notes:
                note(f"a run on this machine is refused: {missing}")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _cache_name(model: str) -> str:
    return f"models--{model.replace('/', '--')}"
