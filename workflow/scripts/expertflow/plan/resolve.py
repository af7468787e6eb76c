"""Resolve every setting of a training run, each with its reason.

A pure function of the manifest's settings, the packed rows, the model's shape and a *named* card:
readings that change from minute to minute belong to the preflight of the training job.
"""

from expertflow.core.errors import ConfigError, HardwareError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost import plan_cost
from expertflow.plan.draft import Draft
from expertflow.plan.flops import CONVENTION, FlopsPerToken, flops_per_token
from expertflow.plan.loader import choose_grouping, choose_loader
from expertflow.plan.memory import KNOWN_ARCHITECTURES
from expertflow.plan.records import LoaderPlan, ModelFacts, PlanSpec, Precision, TrainPlan
from expertflow.plan.schedule import n_steps, steps_per_epoch, warmup_steps
from expertflow.tokens.records import PackingRecord

WANTED_GLOBAL_BATCH, CPU_MICRO_BATCH = 16, 8
USABLE_FRACTION = 0.92
DEFAULT_INTERVAL_S = 1.0
# Settings that the plan takes over from the manifest as they are.
CARRIED = (
    *("method", "lora", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "optim", "save_every_minutes", "save_total_limit"),
    *("logging_steps", "n_threads", "track_per_step_metrics", "seed"),
)
PEAK_REASON = "prior from per-layer figures; no calibration run yet"
GIB = 1 << 30


def plan_training(
    *,
    expert: str,
    spec: PlanSpec,
    packing: PackingRecord,
    facts: ModelFacts,
    n_params: int,
    gpu: GpuFacts | None,
) -> TrainPlan:
    """Resolve a run.

    Raises:
        ConfigError: warm-up would not end, or the budget is exceeded.
        HardwareError: a micro-batch of one row does not fit the card.
    """
    draft = Draft(expert, spec, packing, facts, n_params, gpu)
    precision = _precision(draft)
    micro, checkpoint = _micro_batch(draft, precision)
    accumulation = _accumulation(draft, micro)
    per_epoch = steps_per_epoch(packing.train.n_sequences, micro * accumulation)
    steps = _steps(draft, per_epoch)
    warmup = _warmup(draft, steps)
    tokens = round(packing.train.n_tokens * steps / per_epoch)
    flops = _flops(draft, checkpoint)
    return TrainPlan(
        expert=expert,
        hardware="cpu" if gpu is None else gpu.name,
        gpu=gpu,
        world_size=1,
        micro_batch_size=micro,
        n_accumulation_steps=accumulation,
        global_batch_sequences=micro * accumulation,
        sequence_length_tokens=packing.sequence_length_tokens,
        n_sequences=packing.train.n_sequences,
        n_steps=steps,
        n_steps_per_epoch=per_epoch,
        n_epochs=steps / per_epoch,
        n_warmup_steps=warmup,
        precision=precision,
        use_tf32=spec.use_tf32 and gpu is not None and gpu.peak_tf32_flops_per_s is not None,
        attention=_attention(draft),
        checkpoint_activations=checkpoint,
        save_steps=spec.save_steps or steps,
        eval_steps=spec.eval_steps or per_epoch,
        collection_interval_seconds=spec.collection_interval_seconds or DEFAULT_INTERVAL_S,
        loader=_loader(draft),
        group_by_length=_grouping(draft),
        n_params_total=n_params + (draft.n_trainable if spec.lora else 0),
        n_params_trainable=draft.n_trainable,
        flops_per_token_model=flops.model,
        flops_per_token_hardware=flops.hardware,
        flops_convention=CONVENTION,
        predicted_tokens=tokens,
        predicted_peak_bytes=draft.peak_bytes(micro, precision, checkpoint),
        predicted_peak_reason=_peak_reason(facts),
        cost=plan_cost(spec=spec, gpu=gpu, flops=tokens * flops.model),
        reasons=tuple(draft.reasons),
        **{name: getattr(spec, name) for name in CARRIED},
    )


def _precision(draft: Draft) -> Precision:
    spec, gpu = draft.spec, draft.gpu
    value: Precision
    if gpu is None:
        value, reason = "fp32", "the CPU trains in full precision"
    elif spec.bf16 and gpu.peak_bf16_flops_per_s is None and gpu.peak_fp16_flops_per_s:
        value, reason = "fp16", f"bf16 was asked for and {gpu.name} has none; fp16 with a scaler"
    elif spec.bf16:
        value, reason = "bf16", "bf16 of the manifest"
    elif spec.fp16:
        value, reason = "fp16", "fp16 of the manifest, with a loss scaler"
    else:
        value, reason = "fp32", "neither bf16 nor fp16 is set"
    draft.because("precision", value, reason)
    return value


def _micro_batch(draft: Draft, precision: str) -> tuple[int, bool]:
    """Choose the micro-batch and whether to checkpoint activations."""
    spec, gpu = draft.spec, draft.gpu
    if spec.batch_size is not None:
        checkpoint = bool(spec.gradient_checkpointing)
        draft.because("micro_batch_size", spec.batch_size, "batch_size of the manifest")
        if spec.gradient_checkpointing is None and gpu is not None:
            checkpoint = not _fits(draft, spec.batch_size, precision, checkpoint=False)
        draft.because("checkpoint_activations", checkpoint, _checkpoint_reason(draft, checkpoint))
        return spec.batch_size, checkpoint
    if gpu is None:
        checkpoint = bool(spec.gradient_checkpointing)
        draft.because("micro_batch_size", CPU_MICRO_BATCH, "default on a CPU")
        draft.because("checkpoint_activations", checkpoint, _checkpoint_reason(draft, checkpoint))
        return CPU_MICRO_BATCH, checkpoint
    if gpu.memory_total_bytes is None or draft.peak_bytes(1, precision, False) is None:
        return _micro_batch_by_tier(draft, gpu)
    return _micro_batch_by_memory(draft, precision)


def _micro_batch_by_tier(draft: Draft, gpu: GpuFacts) -> tuple[int, bool]:
    """Go by the card's size where memory cannot be predicted."""
    spec = draft.spec
    size_gb = (gpu.memory_total_bytes or 0) / 1e9
    tiers = (
        (spec.gpu_memory_threshold_large_gb, 16),
        (spec.gpu_memory_threshold_medium_gb, 8),
        (spec.gpu_memory_threshold_small_gb, 4),
        (0.0, 1),
    )
    micro = next(rows for threshold, rows in tiers if size_gb >= threshold)
    reason = f"memory cannot be predicted for this model or card; tier of a {size_gb:.0f} GB card"
    draft.because("micro_batch_size", micro, reason)
    checkpoint = spec.gradient_checkpointing is not False
    draft.because("checkpoint_activations", checkpoint, "on, as memory cannot be predicted")
    return micro, checkpoint


def _micro_batch_by_memory(draft: Draft, precision: str) -> tuple[int, bool]:
    """Take the largest micro-batch up to the wanted global batch that is predicted to fit."""
    wanted = draft.spec.gradient_checkpointing
    for checkpoint in (False, True) if wanted is None else (wanted,):
        for micro in (16, 8, 4, 2, 1):
            if _fits(draft, micro, precision, checkpoint=checkpoint):
                gib = (draft.peak_bytes(micro, precision, checkpoint) or 0) / GIB
                draft.because("micro_batch_size", micro, f"the largest that fits: {gib:.1f} GiB")
                reason = _checkpoint_reason(draft, checkpoint)
                draft.because("checkpoint_activations", checkpoint, reason)
                return micro, checkpoint
    needed = (draft.peak_bytes(1, precision, wanted is not False) or 0) / GIB
    raise HardwareError(
        f"one row of {draft.packing.sequence_length_tokens} tokens needs {needed:.1f} GiB and"
        f" {draft.gpu.name if draft.gpu else 'cpu'} has less; use a larger card, method qlora, a"
        " smaller model, or a shorter max_seq_length"
    )


def _fits(draft: Draft, micro: int, precision: str, *, checkpoint: bool) -> bool:
    total = draft.gpu.memory_total_bytes if draft.gpu else None
    peak = draft.peak_bytes(micro, precision, checkpoint)
    return total is None or peak is None or peak <= USABLE_FRACTION * total


def _checkpoint_reason(draft: Draft, checkpoint: bool) -> str:
    if draft.spec.gradient_checkpointing is not None:
        return "gradient_checkpointing of the manifest"
    return "needed to fit" if checkpoint else "not needed: activations are predicted to fit"


def _accumulation(draft: Draft, micro: int) -> int:
    spec = draft.spec
    if spec.gradient_accumulation_steps is not None:
        value, reason = spec.gradient_accumulation_steps, "set in the manifest"
    elif spec.batch_size is not None:
        value, reason = 1, "the manifest sets the micro-batch and no accumulation"
    else:
        value = -(-WANTED_GLOBAL_BATCH // micro)
        reason = f"for a global batch of about {WANTED_GLOBAL_BATCH} rows"
    draft.because("n_accumulation_steps", value, reason)
    return value


def _steps(draft: Draft, per_epoch: int) -> int:
    spec = draft.spec
    steps, reason = n_steps(
        per_epoch=per_epoch,
        tokens_per_epoch=draft.packing.train.n_tokens,
        num_train_epochs=spec.num_train_epochs,
        max_steps=spec.max_steps,
        target_tokens=spec.target_tokens,
        min_epochs=spec.min_epochs,
        max_epochs=spec.max_epochs,
    )
    draft.because("n_steps", steps, reason)
    return steps


def _warmup(draft: Draft, steps: int) -> int:
    spec = draft.spec
    warmup = warmup_steps(
        steps,
        ratio=spec.warmup_ratio,
        minimum=spec.warmup_steps_min,
        maximum=spec.warmup_steps_max,
        override_minimum=spec.override_min_warmup,
    )
    if warmup >= steps:
        raise ConfigError(
            f"warm-up of {warmup} steps is not below the {steps} steps of the run; lower"
            " training.warmup_steps_min"
        )
    draft.because("n_warmup_steps", warmup, f"{spec.warmup_ratio:.0%} of {steps} steps, bounded")
    return warmup


def _flops(draft: Draft, checkpoint: bool) -> FlopsPerToken:
    train = draft.packing.train
    return flops_per_token(
        draft.facts,
        lora=draft.spec.lora,
        mean_context_tokens=train.sum_len_sq / (2 * train.n_tokens),
        supervised_fraction=draft.supervised_fraction,
        checkpoint_activations=checkpoint,
    )


def _attention(draft: Draft) -> str:
    if not draft.spec.use_sdpa:
        value, reason = "eager", "use_sdpa is false"
    else:
        value, reason = "packed", "documents of a row are isolated by their lengths"
    draft.because("attention", value, reason)
    return value


def _loader(draft: Draft) -> LoaderPlan:
    loader, reasons = choose_loader(draft.spec, draft.packing.packing)
    draft.reasons += reasons
    return loader


def _grouping(draft: Draft) -> bool:
    grouped, reason = choose_grouping(draft.spec, draft.packing.packing)
    draft.reasons.append(reason)
    return grouped


def _peak_reason(facts: ModelFacts) -> str:
    if facts.model_type in KNOWN_ARCHITECTURES:
        return PEAK_REASON
    return f"no figures for the architecture {facts.model_type}"
