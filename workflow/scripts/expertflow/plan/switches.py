"""Choose steps, warm-up, precision, attention, processes and loader; reject contradictions."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from expertflow.core.errors import ConfigError, raise_faults
from expertflow.core.settings import name_of
from expertflow.hardware.gpu_table import is_ampere
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import Attention, PlanSpec, Precision
from expertflow.plan.settings import Loader, LoraSpec, Training
from expertflow.train.optimizers import OPTIMIZERS


def check_settings(training: Training, name: Callable[[str], str]) -> None:
    """Raise ConfigError for contradictory settings; ``name`` returns the name shown to users."""
    raise_faults(
        f"{name(setting if isinstance(setting, str) else name_of(setting))} {problem}"
        for setting, problem in _contradictions(training)
    )


def _contradictions(training: Training) -> Iterator[tuple[Any, str]]:
    low, high = training.warmup_steps_min, training.warmup_steps_max
    if training.bf16 and training.fp16:
        yield Training.bf16, "and fp16 are both true; set one to false"
    if training.pure_bf16 and training.method != "full":
        fix = "set it to false, since a frozen base is in half precision anyway"
        yield Training.pure_bf16, f"needs method full, but method is {training.method}; {fix}"
    if training.pure_bf16 and not training.bf16:
        yield Training.pure_bf16, "is true but bf16 is false; set both to the same value"
    if low > high:
        yield Training.warmup_steps_min, f"{low} is above warmup_steps_max {high}; lower it"
    if training.max_steps is not None and not training.override_min_warmup:
        if low >= training.max_steps:
            yield (
                Training.warmup_steps_min,
                f"{low} is not below max_steps {training.max_steps}; lower it, or set"
                " override_min_warmup to true",
            )
    if training.target_tokens is not None and training.max_steps is not None:
        yield Training.target_tokens, "and max_steps are both set; drop one"
    fewest, most = training.min_epochs, training.max_epochs
    if fewest is not None and most is not None and fewest > most:
        yield Training.min_epochs, f"{fewest:g} is above max_epochs {most:g}; lower it"
    for bound, value in ((Training.min_epochs, fewest), (Training.max_epochs, most)):
        if training.target_tokens is None and value is not None:
            yield bound, "bounds target_tokens, which is not set; set it, or use num_train_epochs"
    if training.lora is not None and "lm_head" in training.lora.targets:
        place = f"{name_of(Training.lora)}.{name_of(LoraSpec.targets)}"
        yield place, "includes lm_head, which the loss reads directly; remove it"
    for setting in (LoraSpec.init_from, LoraSpec.modules_to_save):
        if training.method == "full" and training.lora and getattr(training.lora, name_of(setting)):
            place = f"{name_of(Training.lora)}.{name_of(setting)}"
            yield place, "needs an adapter, but method is full; remove it"
    if not training.use_sdpa and training.attention not in (None, "eager"):
        yield Training.use_sdpa, f"is false and attention is {training.attention}; drop one"
    if training.min_delta and training.patience is None:
        yield Training.min_delta, "has no effect without patience; set patience, or drop it"
    if training.parallel == "fsdp" and not OPTIMIZERS[training.optim].is_shardable:
        fix = f"fsdp cannot shard the states of optim {training.optim}; use adamw_torch_fused"
        yield Training.parallel, fix


def list_required_packages(training: Training) -> Iterator[tuple[str, str]]:
    """Yield the extra packages that these settings need, and what to do if one is missing."""
    package = OPTIMIZERS[training.optim].package
    if training.method == "qlora" or package == "bitsandbytes":
        yield (
            "bitsandbytes",
            "method qlora and optim adamw_8bit need it; pip install -r"
            " envs/requirements-bitsandbytes.lock, or use method lora and optim adamw_torch_fused",
        )
    elif package is not None:
        fix = f"pip install {package}, or use optim adamw_torch_fused"
        yield package, f"optim {training.optim} needs it; {fix}"
    if (tracker := training.report_to) != "none":
        yield tracker, f"pip install {tracker}, or set training.report_to to none"


def choose_precision(
    spec: PlanSpec, gpu: GpuFacts | None, *, by_hand: bool = False
) -> tuple[Precision, str]:
    """Resolve the compute precision; raise ConfigError for pure bf16 on a card without bf16.

    A CPU trains in half precision only ``by_hand``, or if the weights are in bf16.
    """
    if spec.pure_bf16 and gpu and not is_ampere(gpu):
        raise ConfigError(f"training.pure_bf16: {gpu.name} does not support bf16; set it to false")
    if spec.pure_bf16:
        return "bf16", f"{spec.cite_setting(Training.pure_bf16)}: weights and gradients too"
    if gpu is None and not by_hand:
        return "fp32", "the CPU trains in full precision"
    if spec.bf16 and gpu and not is_ampere(gpu):
        return "fp16", f"{gpu.name} does not support bf16; fp16 with a scaler"
    if spec.bf16:
        return "bf16", spec.cite_setting(Training.bf16)
    if spec.fp16:
        return "fp16", f"{spec.cite_setting(Training.fp16)}, with a loss scaler"
    return "fp32", "neither bf16 nor fp16 is set"


def choose_tf32(spec: PlanSpec, gpu: GpuFacts | None) -> tuple[bool, str]:
    if gpu is None:
        return False, "TF32 is a mode of CUDA cards, but this plan trains on a CPU"
    if not is_ampere(gpu):
        return False, f"{gpu.name} lacks TF32 (compute capability {gpu.compute_capability})"
    return spec.use_tf32, spec.cite_setting(Training.use_tf32)


def choose_attention(spec: PlanSpec, gpu: GpuFacts | None) -> tuple[Attention, str]:
    """Resolve the attention route; raise ConfigError if a required kernel cannot run on a CPU."""
    if spec.attention == "varlen" and gpu is None:
        raise ConfigError("training.attention varlen needs a CUDA card; use auto, or sdpa")
    if spec.attention is not None:
        return spec.attention, spec.cite_setting(Training.attention)
    if not spec.use_sdpa:
        return "eager", "use_sdpa is false"
    return "packed", "documents of a row are isolated by their lengths"


def choose_compile(
    spec: PlanSpec, gpu: GpuFacts | None, *, attention: Attention, packing: str
) -> tuple[bool, str]:
    if spec.torch_compile is not None:
        return spec.torch_compile, spec.cite_setting(Training.torch_compile)
    if gpu is None:
        return False, "a CPU gains less than compiling costs"
    if packing == "none":
        return False, "unpacked rows are cut to many lengths, each of which would be compiled"
    if breaks_graphs(spec):
        return False, "peft's DoRA on 4-bit layers breaks each layer's graph"
    if attention not in ("packed", "varlen"):
        return False, f"attention {attention} is for comparison only"
    return True, "all rows have one length, so each kind of layer is compiled once"


def breaks_graphs(spec: PlanSpec) -> bool:
    """Return whether a layer cannot be compiled as one graph: peft's DoRA on 4-bit weights."""
    return spec.method == "qlora" and spec.lora is not None and spec.lora.use_dora


def choose_parallel(spec: PlanSpec, name: str = "training.parallel") -> tuple[str, str]:
    """Return what processes share, for the setting ``name``; raise ConfigError for 4-bit shards."""
    if spec.world_size == 1:
        return "none", "world_size is 1"
    # Checked here, since a comparison with other hardware tries fsdp, too.
    if spec.parallel == "fsdp" and spec.method == "qlora":
        raise ConfigError(f"{name} fsdp cannot shard 4-bit weights; use ddp")
    held = {"ddp": "each process holds the whole model", "fsdp": "each process holds a shard"}
    return spec.parallel, f"{spec.world_size} processes; {held[spec.parallel]}"


def choose_loader(spec: PlanSpec, packing: str) -> dict[Any, tuple[object, str]]:
    """Resolve how batches are loaded: one thread, or workers if requested where they help.

    Returns value and reason of each setting that this decides.
    """
    wanted, cite = spec.dataloader_num_workers, spec.cite_setting
    kind: Loader = "thread"
    why = "one thread: dataloader_num_workers is 0"
    if spec.loader is not None:
        kind, why = spec.loader, cite(Training.loader)
    elif packing != "none":
        why = "one thread: packed rows need no worker processes, which measured slower"
    elif wanted:
        kind, why = "workers", f"unpacked rows, and dataloader_num_workers is {wanted}"
    number, ahead = Training.dataloader_num_workers, Training.dataloader_prefetch_factor
    persistent = Training.dataloader_persistent_workers
    chosen: dict[Any, tuple[object, str]] = {
        Training.loader: (kind, why),
        number: (wanted, cite(number)),
        ahead: (spec.dataloader_prefetch_factor, cite(ahead)),
        persistent: (spec.dataloader_persistent_workers, cite(persistent)),
    }
    if kind == "thread":
        unused = f"; dataloader_num_workers {wanted} is not used" if wanted else ""
        chosen[number] = (0, f"the thread needs none{unused}")
    elif not wanted:
        chosen[ahead] = (0, "no workers: every batch is made on demand")
    if kind == "thread" or not wanted:
        why = "there are no worker processes to keep between epochs"
        chosen[persistent] = (False, why)
    return chosen


def choose_grouping(spec: PlanSpec, packing: str) -> tuple[bool, str]:
    if packing != "none":
        return False, f"packing {packing}: all rows have one length"
    return spec.group_by_length, spec.cite_setting(Training.group_by_length)


def choose_warmup(settings: Training, n_steps: int) -> tuple[int, str]:
    """Return the number of warm-up steps, always below the number of steps.

    >>> choose_warmup(Training(), 66)
    (7, '0.1 x 66 steps = 6.6, rounded; warmup_steps_min 10 gives way to the ratio')
    >>> choose_warmup(Training(override_min_warmup=False), 66)
    (10, '0.1 x 66 steps = 6.6; warmup_steps_min is 10')
    """
    ratio, minimum = settings.warmup_ratio, settings.warmup_steps_min
    maximum, wanted = settings.warmup_steps_max, round(settings.warmup_ratio * n_steps)
    # At least one step is left for the peak rate.
    high = min(maximum, n_steps - 1)
    low = min(minimum, high)
    if settings.override_min_warmup:
        low = min(low, math.floor(ratio * n_steps))
    warmup = max(low, min(wanted, high))
    base = f"{ratio:.3g} x {n_steps} steps = {ratio * n_steps:.3g}"
    if warmup == wanted:
        rule = f"; warmup_steps_min {minimum} gives way to the ratio" if warmup < minimum else ""
        return warmup, f"{base}, rounded{rule}"
    if warmup > wanted:
        return warmup, f"{base}; warmup_steps_min is {minimum}"
    bound = f"warmup_steps_max is {maximum}" if warmup == maximum else "kept below the steps"
    return warmup, f"{base}; {bound}"


def choose_steps(settings: Training, per_epoch: int, *, tokens_per_epoch: int) -> tuple[int, str]:
    if settings.max_steps is not None:
        return settings.max_steps, f"max_steps is {settings.max_steps}"
    epochs = count_epochs(settings, tokens_per_epoch)
    reason = f"{epochs:g} epochs of {per_epoch} steps"
    if settings.target_tokens is not None:
        reason = f"{settings.target_tokens} target tokens are {epochs:.2f} epochs"
    # 1.1 x 50 is 55.00000000000001, which must not add a 56th step.
    return max(1, math.ceil(epochs * per_epoch - 1e-9)), reason


def count_epochs(settings: Training, tokens_per_epoch: float) -> float:
    """Return the epochs set, or those that target_tokens take, within their bounds."""
    if settings.target_tokens is None:
        return settings.num_train_epochs
    least, most = settings.min_epochs or 0.0, settings.max_epochs or math.inf
    return min(max(settings.target_tokens / tokens_per_epoch, least), most)
