"""Resolve every setting of a training run, each with its reason, and predict time and cost.

A pure function of the manifest's settings, the packed rows, the model's shape and a *named* card:
readings that change from minute to minute belong to the preflight of the training job.
"""

import math
from typing import Any

from msgspec.structs import replace

from expertflow.plan import switches, tuned
from expertflow.plan.claims import check_claims
from expertflow.plan.cost import check_budgets, check_cost, plan_cost, speed_of
from expertflow.plan.draft import PlanDraft
from expertflow.plan.flops import CONVENTION, flops_doubts
from expertflow.plan.memory import peak_bytes, peak_reason, predict_memory
from expertflow.plan.micro_batch import choose_batch
from expertflow.plan.options import compare_options
from expertflow.plan.reasons import note_rest, source_values
from expertflow.plan.records import Calibration, CostPlan, TrainPlan
from expertflow.plan.settings import Training
from expertflow.plan.tuned import Chosen, Tuning


def plan_training(
    draft: PlanDraft, *, calibration: Calibration | None = None, tuning: Tuning | None = None
) -> TrainPlan:
    """Resolve a run; raise ConfigError for contradictions, HardwareError if no row fits."""
    draft = replace(draft, reasons={})
    plan, chosen = resolve_settings(draft), None
    if tuning is not None:
        plan, chosen = _with_tuning(draft, plan, tuning)
    measured, ignored = tuned.usable(
        calibration, tuned.calibration_key(plan, draft.facts.model_type)
    )
    cost = plan_cost(draft.spec, plan, calibration=measured, ignored=ignored)
    plan = replace(plan, cost=cost)
    speed = speed_of(plan)
    check_cost(cost, speed)
    for key, budget, because in check_budgets(cost, draft.spec):
        draft.note(key, budget, because)
    claims = check_claims(draft.spec.claims, speed)
    plan = replace(plan, options=compare_options(draft, plan), claims=claims)
    note_rest(draft, chosen.spec if chosen else draft.spec, plan)
    if chosen is not None:
        plan = replace(plan, origins=plan.origins | dict.fromkeys(chosen.free, "tuned"))
    replaced = source_values(draft.spec.system, n_steps=plan.n_steps)
    reasons = (
        replace(
            reason if chosen is None else tuned.explain_tuned(reason, chosen),
            origin=plan.origins.get(name, "computed"),
            source_value=replaced.get(name),
        )
        for name, reason in draft.reasons.items()
    )
    return replace(plan, reasons=tuple(reasons))


def _with_tuning(
    draft: PlanDraft, plan: TrainPlan, tuning: Tuning
) -> tuple[TrainPlan, Chosen | None]:
    packing, model_type = draft.packing.packing, draft.facts.model_type
    key = tuned.tuning_key(plan, model_type=model_type, packing=packing, cpu=tuning.cpu)
    chosen = tuned.choose(tuning.record, plan, draft.spec, key=key)
    if isinstance(chosen, str):
        draft.note("tuned", draft.spec.tuned, chosen)
        return plan, None
    trace, attention = draft.trace, chosen.spec.attention
    if attention is not None and attention != plan.attention:
        trace = tuning.trace(attention)
    again = replace(draft, spec=chosen.spec, trace=trace, reasons={})
    # The manifest decides whether its micro-batch is automatic, not the tuned spec.
    plan = replace(resolve_settings(again), may_halve_micro_batch=plan.may_halve_micro_batch)
    draft.reasons = again.reasons
    draft.note("tuned", draft.spec.tuned, "counts where the manifest leaves a setting open")
    return plan, chosen


def resolve_settings(draft: PlanDraft) -> TrainPlan:
    spec, packing, gpu, note = draft.spec, draft.packing, draft.gpu, draft.note
    train, place = packing.train, "--parallel" if draft.by_hand else "training.parallel"
    precision = note("precision", *switches.choose_precision(spec, gpu, by_hand=draft.by_hand))
    micro, accumulation, checkpoint = choose_batch(draft)
    global_batch = micro * accumulation * spec.world_size
    per_epoch = -(-train.n_sequences // global_batch)
    steps = note(
        "n_steps", *switches.choose_steps(spec, per_epoch, tokens_per_epoch=train.n_tokens)
    )
    warmup = note("n_warmup_steps", *switches.choose_warmup(spec, steps))
    attention = note("attention", *switches.choose_attention(spec, gpu))
    note("parallel", *switches.choose_parallel(spec, place))
    chosen = {
        **switches.choose_loader(spec, packing.packing),
        "use_tf32": switches.choose_tf32(spec, gpu),
        "torch_compile": switches.choose_compile(
            spec, gpu, attention=attention, packing=packing.packing
        ),
        "group_by_length": switches.choose_grouping(spec, packing.packing),
    }
    resolved = {
        **{name: getattr(spec, name) for name in Training.__struct_fields__},
        **{name: note(name, *choice) for name, choice in chosen.items()},
        "batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": checkpoint,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "attention": attention,
        "save_steps": spec.save_steps or steps,
        "eval_steps": spec.eval_steps or per_epoch,
    }
    # Settings that the plan does not resolve, such as the row length, are passed through.
    origins = spec.origins | {
        name: spec.origins.get(name, "default") if value == getattr(spec, name) else "computed"
        for name, value in resolved.items()
    }
    return TrainPlan(
        **resolved,
        origins=origins,
        expert=draft.expert,
        hardware=draft.hardware,
        gpu=gpu,
        may_halve_micro_batch=spec.batch_size is None,
        global_batch_sequences=global_batch,
        sequence_length_tokens=packing.sequence_length_tokens,
        n_sequences=train.n_sequences,
        n_steps=steps,
        n_steps_per_epoch=per_epoch,
        n_epochs=steps / per_epoch,
        n_warmup_steps=warmup,
        n_decay_steps=min(steps - warmup, math.ceil(spec.lr_decay_ratio * steps)),
        precision=precision,
        predicted_tokens=round(train.n_tokens * steps / per_epoch),
        cost=CostPlan(reason=""),
        reasons=(),
        **_predict(draft, micro, checkpoint=checkpoint),
    )


def _predict(draft: PlanDraft, micro: int, *, checkpoint: bool) -> dict[str, Any]:
    if doubts := flops_doubts(draft.facts, draft.spec.lora):
        draft.note("flops_per_token_model", "approximate", doubts)
    flops = draft.flops(checkpoint=checkpoint)
    memory = predict_memory(draft, micro, checkpoint=checkpoint)
    plain = peak_bytes(draft, micro, checkpoint=False) if checkpoint else None
    return {
        "n_params_total": draft.n_params_total,
        "n_params_trainable": draft.n_trainable,
        "memory": memory,
        "predicted_peak_bytes": None if memory is None else memory.total_bytes,
        "predicted_peak_reason": peak_reason(draft),
        "next_micro_batch_peak_bytes": peak_bytes(draft, 2 * micro, checkpoint=checkpoint),
        "without_checkpointing_peak_bytes": plain,
        "flops_per_token_model": flops.model,
        "flops_per_token_hardware": flops.hardware,
        "flops_convention": CONVENTION,
    }
