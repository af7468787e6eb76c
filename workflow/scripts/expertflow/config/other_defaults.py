"""Set and explain what another trainer's file leaves unset."""

from collections.abc import Iterator

from expertflow.config.read_yaml import Settings
from expertflow.core.settings import name_of
from expertflow.plan.settings import LoraSpec, TrainingSection


def complete_training(training: Settings, found: Settings) -> None:
    """Set what a file implies but does not state, where our defaults would differ."""
    if found.get("warmup_steps") == 0:
        training.setdefault(name_of(TrainingSection.warmup_ratio), 0.0)
    if "constant" in (found.get("lr_scheduler_type"), found.get("lr_scheduler")):
        # A constant rate has no warm-up, whatever else a file sets.
        for name in [name for name in training if "warmup" in name]:
            del training[name]
        training[name_of(TrainingSection.warmup_ratio)] = 0.0
    if training.get(name_of(TrainingSection.fp16)) is True:
        training.setdefault(name_of(TrainingSection.bf16), False)
    if "finetuning_type" in found and training[name_of(TrainingSection.method)] != "full":
        # LLaMA-Factory's own defaults.
        lora = training.setdefault(name_of(TrainingSection.lora), {})
        rank = lora.setdefault(name_of(LoraSpec.r), 8)
        lora.setdefault(name_of(LoraSpec.alpha), 2 * rank)
        lora.setdefault(name_of(LoraSpec.dropout), 0.0)
    if micro := training.get(name_of(TrainingSection.batch_size)):
        # Of LitGPT; a list of devices, or auto, is taken as one.
        rows, n = found.get("global_batch_size"), found.get("devices")
        n_rows = rows // (n if isinstance(n, int) else 1) if isinstance(rows, int) else micro
        accumulation = name_of(TrainingSection.gradient_accumulation_steps)
        training.setdefault(accumulation, max(1, n_rows // micro))
    packing = "concat" if found.get("stage") == "pt" else "none"
    training.setdefault(name_of(TrainingSection.packing), packing)


def explain_defaults(manifest: Settings) -> Iterator[str]:
    """Yield a line with the important settings that get our defaults."""
    training = manifest["training"]
    replaced = {
        TrainingSection.num_train_epochs: TrainingSection.max_steps,
        TrainingSection.learning_rate: TrainingSection.learning_rate,
        TrainingSection.lr_scheduler_type: TrainingSection.lr_scheduler_type,
        TrainingSection.warmup_ratio: TrainingSection.warmup_steps_min,
        TrainingSection.batch_size: TrainingSection.batch_size,
        TrainingSection.max_seq_length: TrainingSection.max_seq_length,
    }
    pairs = ((name_of(ours), name_of(other)) for ours, other in replaced.items())
    names = [name for name, other in pairs if not {name, other} & training.keys()]
    if training[name_of(TrainingSection.method)] != "full":
        lora = name_of(TrainingSection.lora)
        decisive = map(name_of, (LoraSpec.r, LoraSpec.alpha, LoraSpec.dropout, LoraSpec.targets))
        names += [f"{lora}.{name}" for name in decisive if name not in training.get(lora, {})]
    if "supervise" not in manifest.get("data", {}):
        # TRL by default learns every token of a chat.
        names.append("data.supervise")
    if names:
        yield f"Not set there, so our defaults apply: {', '.join(names)}."


def explain_rows(training: Settings) -> Iterator[str]:
    """Yield what a step was and is: a packed row has several examples."""
    rows = training.get(name_of(TrainingSection.batch_size))
    if rows is None:
        return
    times = training[name_of(TrainingSection.gradient_accumulation_steps)]
    is_packed = training[name_of(TrainingSection.packing)] != "none"
    what = "packed rows" if is_packed else "examples"
    yield f"A step has {rows * times} {what} per card, as before. With packing bfd, a row has"
    yield "several examples: show_plan.py shows the steps then and now, and the batch to set."
