"""Refuse training settings that are fine alone and wrong together."""

from collections.abc import Callable, Iterator

from expertflow.core.errors import ConfigError
from expertflow.plan.settings import Training


def check_settings(training: Training, name: Callable[[str], str]) -> None:
    """Refuse contradictions; ``name`` turns a setting into what the user knows it by.

    Raises:
        ConfigError: names the settings and the fix.
    """
    for setting, problem in _contradictions(training):
        raise ConfigError(f"{name(setting)} {problem}")


def _contradictions(training: Training) -> Iterator[tuple[str, str]]:
    low, high = training.warmup_steps_min, training.warmup_steps_max
    if training.bf16 and training.fp16:
        yield "bf16", "and fp16 are both true; set one false"
    if low > high:
        yield "warmup_steps_min", f"{low} is above warmup_steps_max {high}; lower it"
    if training.max_steps is not None and not training.override_min_warmup:
        if low >= training.max_steps:
            yield (
                "warmup_steps_min",
                f"{low} is not below max_steps {training.max_steps}; lower it, or set"
                " override_min_warmup true",
            )
    if training.target_tokens is not None and training.max_steps is not None:
        yield "target_tokens", "and max_steps are both set; drop one"
    if training.target_tokens is None:
        for key, value in (
            ("min_epochs", training.min_epochs),
            ("max_epochs", training.max_epochs),
        ):
            if value is not None:
                fix = "bounds target_tokens, which is not set; set it, or use num_train_epochs"
                yield key, fix
    if training.lora is not None and "lm_head" in training.lora.targets:
        yield "lora.targets", "names lm_head, which the loss reads directly; leave it out"
    if not training.use_sdpa and training.attention not in (None, "eager"):
        yield "use_sdpa", f"is false and attention is {training.attention}; drop one"
    if training.min_delta and training.patience is None:
        yield "min_delta", "has no effect without patience; set patience, or drop it"
    if training.parallel == "fsdp" and training.optim == "adamw_8bit":
        fix = "fsdp cannot share out the states of optim adamw_8bit; use adamw_torch_fused"
        yield "parallel", fix
