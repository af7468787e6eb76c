"""Resolve every setting of a training run, each with its reason, and predict what it takes.

A pure function of the manifest's settings, the packed rows, the model's shape and a *named* card:
readings that change from minute to minute belong to the preflight of the training job.
"""

import math
from typing import Any, TypeVar

from msgspec.structs import replace

from expertflow.core.errors import ConfigError
from expertflow.hardware.gpu_table import gpu_by_name
from expertflow.hardware.records import GpuFacts
from expertflow.plan.arithmetic import Speed, check_claims, check_speed
from expertflow.plan.calibrated import calibration_key, usable
from expertflow.plan.cost import amount_words, peak_flops_per_s, plan_cost
from expertflow.plan.cost_records import USABLE_FRACTION, Calibration, CostPlan, MemoryTrace
from expertflow.plan.draft import Draft
from expertflow.plan.explain import explain_rest
from expertflow.plan.flops import CONVENTION, flops_doubts
from expertflow.plan.loader import choose_grouping, choose_loader
from expertflow.plan.memory import peak_reason
from expertflow.plan.micro_batch import choose_micro_batch
from expertflow.plan.options import compare_options
from expertflow.plan.origins import Origin
from expertflow.plan.records import ModelFacts, PlanSpec, Reason, TrainPlan
from expertflow.plan.schedule import n_steps, steps_per_epoch, warmup_reason, warmup_steps
from expertflow.plan.settings import Training
from expertflow.plan.source_systems import with_source_values
from expertflow.plan.switches import (
    check_parallel,
    choose_attention,
    choose_compile,
    choose_precision,
    choose_tf32,
)
from expertflow.plan.tuned import Tuning, explained, with_tuning
from expertflow.plan.work import flops_of, work_of
from expertflow.tokens.records import PackingRecord

T = TypeVar("T")
WANTED_GLOBAL_BATCH = 16
NOTHING = CostPlan(
    price_usd_per_hour=None, price_as_of=None, predicted_hours=None, predicted_hours_low=None,
    predicted_hours_high=None, predicted_usd=None, predicted_usd_low=None, predicted_usd_high=None,
    reason="",
)  # fmt: skip


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
    tuning: Tuning | None = None,
) -> TrainPlan:
    """Resolve a run; ``trace`` and ``calibration`` sharpen what it should take, if there are any.

    ``tuning`` is taken over where it is of this run.

    Raises:
        ConfigError: warm-up would not end, or the budget is exceeded.
        HardwareError: a micro-batch of one row does not fit the card.
    """
    draft = Draft(expert, spec, packing, facts, n_params, gpu, trace, calibration)
    plan, chosen = with_tuning(draft, resolve_settings(draft), tuning, resolve=resolve_settings)
    plan = _with_forecast(draft, plan)
    rest = explain_rest(
        chosen.spec if chosen else spec,
        packing,
        cost=plan.cost,
        n_steps=plan.n_steps,
        save_steps=plan.save_steps,
        eval_steps=plan.eval_steps,
    )
    if chosen is not None:
        plan = replace(plan, origins=plan.origins | dict.fromkeys(chosen.free, "tuned"))
    reasons = [
        replace(reason, origin=plan.origins.get(reason.setting, "computed"))
        for reason in explained([*draft.reasons, *rest], chosen)
    ]
    return replace(plan, reasons=with_source_values(reasons, spec.system, n_steps=plan.n_steps))


def resolve_settings(draft: Draft) -> TrainPlan:
    """Resolve the settings; what they should cost is left open."""
    spec, packing, gpu = draft.spec, draft.packing, draft.gpu
    precision = _take(draft, choose_precision(spec, gpu, by_hand=draft.by_hand))
    micro, checkpoint = _shared(draft, precision, *choose_micro_batch(draft, precision))
    accumulation = _accumulation(draft, micro)
    global_batch = micro * accumulation * spec.world_size
    per_epoch = steps_per_epoch(packing.train.n_sequences, global_batch)
    steps = _steps(draft, per_epoch)
    warmup = _warmup(draft, steps)
    attention = _take(draft, choose_attention(spec, gpu))
    compiled = choose_compile(spec, gpu, attention=attention, packing=packing.packing)
    loader, loader_reasons = choose_loader(spec, packing.packing)
    place = "--parallel" if draft.by_hand else "training.parallel"
    draft.reasons += [check_parallel(spec, place), *loader_reasons]
    resolved = {
        **{name: getattr(spec, name) for name in Training.__struct_fields__},
        **loader,
        "batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": checkpoint,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_tf32": _take(draft, choose_tf32(spec, gpu)),
        "attention": attention,
        "torch_compile": _take(draft, compiled),
        "group_by_length": _take(draft, choose_grouping(spec, packing.packing)),
        "save_steps": spec.save_steps or steps,
        "eval_steps": spec.eval_steps or per_epoch,
    }
    return TrainPlan(
        **resolved,
        origins=_origins(spec, resolved),
        expert=draft.expert,
        hardware="cpu" if gpu is None else gpu.name,
        gpu=gpu,
        may_halve_micro_batch=spec.batch_size is None,
        global_batch_sequences=global_batch,
        sequence_length_tokens=packing.sequence_length_tokens,
        n_sequences=packing.train.n_sequences,
        n_steps=steps,
        n_steps_per_epoch=per_epoch,
        n_epochs=steps / per_epoch,
        n_warmup_steps=warmup,
        n_decay_steps=min(steps - warmup, math.ceil(spec.lr_decay_ratio * steps)),
        precision=precision,
        predicted_tokens=round(packing.train.n_tokens * steps / per_epoch),
        cost=NOTHING,
        reasons=(),
        **_work_and_memory(draft, precision, micro, checkpoint),
    )


def _origins(spec: PlanSpec, resolved: dict[str, Any]) -> dict[str, Origin]:
    """Say where each setting's value comes from: what the plan changed was computed."""
    found: dict[str, Origin] = {
        name: spec.origins.get(name, "default") if value == getattr(spec, name) else "computed"
        for name, value in resolved.items()
    }
    # What is no setting of the plan's is told as it is, such as the length of rows.
    return {**spec.origins, **found}


def _work_and_memory(draft: Draft, precision: str, micro: int, checkpoint: bool) -> dict[str, Any]:
    """Count parameters and FLOPs, and predict memory."""
    flops = flops_of(draft, checkpoint=checkpoint)
    draft.reasons += flops_doubts(draft.facts, draft.spec.lora)
    plain = draft.peak_bytes(micro, precision, False) if checkpoint else None
    return {
        "n_params_total": draft.n_params + (draft.n_trainable if draft.spec.lora else 0),
        "n_params_trainable": draft.n_trainable,
        "predicted_peak_bytes": draft.peak_bytes(micro, precision, checkpoint),
        "predicted_peak_reason": peak_reason(draft.facts, draft.trace, draft.gpu),
        "next_micro_batch_peak_bytes": draft.peak_bytes(2 * micro, precision, checkpoint),
        "without_checkpointing_peak_bytes": plain,
        "memory": draft.memory_parts(micro, precision, checkpoint),
        "flops_per_token_model": flops.model,
        "flops_per_token_hardware": flops.hardware,
        "flops_convention": CONVENTION,
    }


def _with_forecast(draft: Draft, plan: TrainPlan) -> TrainPlan:
    """Predict hours and dollars, compare hardware, and check what others claim."""
    spec = draft.spec
    measured, ignored = usable(draft.calibration, calibration_key(plan, draft.facts.model_type))
    work = work_of(draft, plan, plan.precision, checkpoint=plan.gradient_checkpointing)
    cost = plan_cost(spec=spec, gpu=draft.gpu, work=work, calibration=measured, ignored=ignored)
    plan = replace(plan, cost=cost)
    speed = speed_of(plan)
    check_speed(cost, speed)
    draft.reasons += _budget_reasons(cost, spec)
    cards = {
        choice.name: facts
        for choice in spec.compare
        if (facts := gpu_by_name(choice.name, list(spec.gpu_table))) is not None
    }
    return replace(
        plan,
        options=compare_options(draft, plan, cards),
        claims=check_claims(spec.claims, speed),
    )


def speed_of(plan: TrainPlan) -> Speed:
    """Give what claims about one card like this one are held against."""
    hours, tokens_per_s = plan.cost.step_hours, None
    if hours is not None:
        tokens_per_s = plan.predicted_tokens / (hours * 3600) / plan.world_size
    return Speed(
        hardware=plan.hardware,
        flops_per_token=plan.flops_per_token_model,
        peak_flops_per_s=peak_flops_per_s(plan.gpu, plan.precision, use_tf32=plan.use_tf32),
        tokens_per_s=tokens_per_s,
    )


def _budget_reasons(cost: CostPlan, spec: PlanSpec) -> list[Reason]:
    """Say how budgets were held against the prediction, and warn where its high end is above."""
    reasons = []
    for key, budget, middle, high in (
        ("max_hours", spec.max_hours, cost.predicted_hours, cost.predicted_hours_high),
        ("max_usd", spec.max_usd, cost.predicted_usd, cost.predicted_usd_high),
    ):
        if budget is None:
            continue
        if middle is None or high is None:
            words = "left out: the demo is on the CPU, where nothing can be held against it"
            reasons.append(Reason(setting=key, value=f"{budget:g}", because=words))
            continue
        most = amount_words(key, high)
        words = f"the prediction is {amount_words(key, middle)}, at most {most}"
        if high > budget:
            words += ": within the budget in the middle, above it at the high end"
        reasons.append(Reason(setting=key, value=f"{budget:g}", because=words))
    return reasons


def _shared(draft: Draft, precision: str, micro: int, checkpoint: bool) -> tuple[int, bool]:
    """Lower an automatic micro-batch so that all processes together take the wanted batch.

    To a power of two, so that it can be halved when memory runs out.
    """
    spec = draft.spec
    free = spec.batch_size is None and spec.gradient_accumulation_steps is None
    most = max(1, WANTED_GLOBAL_BATCH // spec.world_size)
    if not free or micro <= most:
        return micro, checkpoint
    lower = 1 << (most.bit_length() - 1)
    _again(
        draft, "batch_size", lower,
        f"{spec.world_size} processes share a global batch of about {WANTED_GLOBAL_BATCH} rows;"
        f" {micro} would fit each",
    )  # fmt: skip
    total = draft.gpu.memory_total_bytes if draft.gpu else None
    plain = draft.peak_bytes(lower, precision, False)
    if checkpoint and spec.gradient_checkpointing is None and total and plain is not None:
        if plain <= USABLE_FRACTION * total:
            checkpoint = False
            because = "not needed: activations of so few rows are predicted to fit"
            _again(draft, "gradient_checkpointing", checkpoint, because)
    return lower, checkpoint


def _again(draft: Draft, setting: str, value: object, reason: str) -> None:
    """Note another value of a setting, and its reason, in the old one's place."""
    new = Reason(setting=setting, value=str(value), because=reason)
    draft.reasons[:] = [new if old.setting == setting else old for old in draft.reasons]


def _accumulation(draft: Draft, micro: int) -> int:
    spec = draft.spec
    if spec.gradient_accumulation_steps is not None:
        value = spec.gradient_accumulation_steps
        reason = spec.told("gradient_accumulation_steps")
    elif spec.batch_size is not None:
        value, reason = 1, "the manifest sets the micro-batch and no accumulation"
    else:
        value = max(1, round(WANTED_GLOBAL_BATCH / (micro * spec.world_size)))
        shared = f" x {spec.world_size}" if spec.world_size > 1 else ""
        reason = (
            f"for a global batch of about {WANTED_GLOBAL_BATCH} rows: {micro} x {value}{shared} are"
            f" {micro * value * spec.world_size}"
        )
    draft.because("gradient_accumulation_steps", value, reason)
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
    bounds = {"minimum": spec.warmup_steps_min, "maximum": spec.warmup_steps_max}
    warmup = warmup_steps(
        steps, ratio=spec.warmup_ratio, override_minimum=spec.override_min_warmup, **bounds
    )
    if warmup >= steps:
        raise ConfigError(
            f"warm-up of {warmup} steps is not below the {steps} steps of the run; lower"
            " training.warmup_steps_min"
        )
    reason = warmup_reason(steps, warmup, ratio=spec.warmup_ratio, **bounds)
    draft.because("n_warmup_steps", warmup, reason)
    return warmup


def _take(draft: Draft, chosen: tuple[T, Reason]) -> T:
    """Keep the reason of a choice, and give its value."""
    value, reason = chosen
    draft.reasons.append(reason)
    return value
