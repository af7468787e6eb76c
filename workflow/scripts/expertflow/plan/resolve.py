"""Resolve every setting of a training run, each with its reason.

A pure function of the manifest's settings, the packed rows, the model's shape and a *named* card:
readings that change from minute to minute belong to the preflight of the training job.
"""

import math
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost import plan_cost
from expertflow.plan.cost_records import Calibration, MemoryTrace
from expertflow.plan.draft import Draft
from expertflow.plan.flops import CONVENTION, flops_per_token
from expertflow.plan.loader import choose_grouping, choose_loader
from expertflow.plan.memory import KNOWN_ARCHITECTURES
from expertflow.plan.micro_batch import choose_micro_batch
from expertflow.plan.records import LoaderPlan, ModelFacts, PlanSpec, Precision, TrainPlan
from expertflow.plan.schedule import n_steps, steps_per_epoch, warmup_steps
from expertflow.plan.switches import Attention, check_parallel, choose_attention, choose_compile
from expertflow.tokens.records import PackingRecord

WANTED_GLOBAL_BATCH = 16
# Settings that the plan takes over from the manifest as they are.
CARRIED = (
    *("method", "lora", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "label_smoothing_factor", "max_loss"),
    *("save_every_minutes", "save_total_limit", "load_best_model_at_end", "patience", "min_delta"),
    *("logging_steps", "report_to", "world_size", "parallel", "deterministic", "n_threads"),
    *("track_per_step_metrics", "seed", "collection_interval_seconds"),
)
PEAK_REASON = "prior from per-layer figures; no calibration run yet"


def plan_training(
    *,
    expert: str,
    spec: PlanSpec,
    packing: PackingRecord,
    facts: ModelFacts,
    n_params: int,
    gpu: GpuFacts | None,
    trace: MemoryTrace | None = None,
    calibration: Calibration | None = None,
) -> TrainPlan:
    """Resolve a run; ``trace`` and ``calibration`` sharpen what it should take, if there are any.

    Raises:
        ConfigError: warm-up would not end, or the budget is exceeded.
        HardwareError: a micro-batch of one row does not fit the card.
    """
    draft = Draft(expert, spec, packing, facts, n_params, gpu, trace, calibration)
    precision = _precision(draft)
    micro, checkpoint = choose_micro_batch(draft, precision)
    accumulation = _accumulation(draft, micro)
    global_batch = micro * accumulation * spec.world_size
    per_epoch = steps_per_epoch(packing.train.n_sequences, global_batch)
    steps = _steps(draft, per_epoch)
    warmup = _warmup(draft, steps)
    tokens = round(packing.train.n_tokens * steps / per_epoch)
    attention = _attention(draft)
    draft.reasons.append(check_parallel(spec))
    return TrainPlan(
        expert=expert,
        hardware="cpu" if gpu is None else gpu.name,
        gpu=gpu,
        micro_batch_size=micro,
        may_halve_micro_batch=spec.batch_size is None,
        n_accumulation_steps=accumulation,
        global_batch_sequences=global_batch,
        sequence_length_tokens=packing.sequence_length_tokens,
        n_sequences=packing.train.n_sequences,
        n_steps=steps,
        n_steps_per_epoch=per_epoch,
        n_epochs=steps / per_epoch,
        n_warmup_steps=warmup,
        n_decay_steps=min(steps - warmup, math.ceil(spec.lr_decay_ratio * steps)),
        precision=precision,
        use_tf32=spec.use_tf32 and gpu is not None and gpu.peak_tf32_flops_per_s is not None,
        attention=attention,
        torch_compile=_compile(draft, attention),
        checkpoint_activations=checkpoint,
        save_steps=spec.save_steps or steps,
        eval_steps=spec.eval_steps or per_epoch,
        loader=_loader(draft),
        group_by_length=_grouping(draft),
        n_params_total=n_params + (draft.n_trainable if spec.lora else 0),
        n_params_trainable=draft.n_trainable,
        predicted_tokens=tokens,
        predicted_peak_bytes=draft.peak_bytes(micro, precision, checkpoint),
        predicted_peak_reason=_peak_reason(facts),
        memory=draft.memory_parts(micro, precision, checkpoint),
        **_work(draft, tokens, checkpoint),
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


def _accumulation(draft: Draft, micro: int) -> int:
    spec = draft.spec
    if spec.gradient_accumulation_steps is not None:
        value, reason = spec.gradient_accumulation_steps, "set in the manifest"
    elif spec.batch_size is not None:
        value, reason = 1, "the manifest sets the micro-batch and no accumulation"
    else:
        value = -(-WANTED_GLOBAL_BATCH // (micro * spec.world_size))
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


def _work(draft: Draft, tokens: int, checkpoint: bool) -> dict[str, Any]:
    """Give the FLOPs of a token, and what those of the whole run cost."""
    train = draft.packing.train
    flops = flops_per_token(
        draft.facts,
        lora=draft.spec.lora,
        mean_context_tokens=train.sum_len_sq / (2 * train.n_tokens),
        supervised_fraction=draft.supervised_fraction,
        checkpoint_activations=checkpoint,
    )
    return {
        "flops_per_token_model": flops.model,
        "flops_per_token_hardware": flops.hardware,
        "flops_convention": CONVENTION,
        "cost": plan_cost(spec=draft.spec, gpu=draft.gpu, flops=tokens * flops.model),
    }


def _attention(draft: Draft) -> Attention:
    value, reason = choose_attention(draft.spec, draft.gpu)
    draft.reasons.append(reason)
    return value


def _compile(draft: Draft, attention: Attention) -> bool:
    value, reason = choose_compile(
        draft.spec, draft.gpu, attention=attention, packing=draft.packing.packing
    )
    draft.reasons.append(reason)
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
