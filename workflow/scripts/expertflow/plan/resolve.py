"""Resolve every setting of a training run, each with its reason, and predict time and cost.

A pure function of the manifest's settings, the packed rows, the model's shape and a *named* card:
readings that change from minute to minute belong to the preflight of the training job.
"""

import math
from typing import Any

from msgspec.structs import replace

from expertflow.core.settings import name_of
from expertflow.plan import switches, tuned
from expertflow.plan.claims import check_claims
from expertflow.plan.cost import check_budgets, plan_cost, speed_of
from expertflow.plan.draft import PlanDraft
from expertflow.plan.flops import CONVENTION, flops_doubts
from expertflow.plan.memory import peak_bytes, peak_reason, predict_memory
from expertflow.plan.micro_batch import choose_batch
from expertflow.plan.options import compare_options
from expertflow.plan.reasons import note_rest, source_values
from expertflow.plan.records import Calibration, CostPlan, TrainPlan
from expertflow.plan.settings import Training
from expertflow.plan.tuned import Tuning


def plan_training(
    draft: PlanDraft, *, calibration: Calibration | None = None, tuning: Tuning | None = None
) -> TrainPlan:
    """Resolve a run; raise ConfigError for contradictions, HardwareError if no row fits."""
    draft, spec = replace(draft, chosen={}, reasons={}), draft.spec
    plan, adopted = resolve_settings(draft), None
    if tuning is not None:
        trial = tuned.choose_tuned(tuning, plan, draft)
        if isinstance(trial, str):
            draft.note(Training.tuned, spec.tuned, trial)
        else:
            adopted, spec = trial, trial.spec
            trace = draft.trace
            if spec.attention is not None and spec.attention != plan.attention:
                trace = tuning.trace(spec.attention)
            again = replace(draft, spec=spec, trace=trace, chosen={}, reasons={})
            # The manifest decides whether its micro-batch is automatic, not the tuned spec.
            plan = replace(
                resolve_settings(again), may_halve_micro_batch=plan.may_halve_micro_batch
            )
            draft.reasons = again.reasons
            because = "counts where the manifest leaves a setting open"
            draft.note(Training.tuned, spec.tuned, because)
    key = tuned.calibration_key(plan, draft.facts.model_type)
    measured, ignored = tuned.usable(calibration, key)
    cost = plan_cost(draft.spec, plan, calibration=measured, ignored=ignored)
    plan = replace(plan, cost=cost)
    for budget in check_budgets(cost, draft.spec):
        draft.note(*budget)
    claims = check_claims(draft.spec.claims, speed_of(plan))
    plan = replace(plan, options=compare_options(draft, plan), claims=claims)
    note_rest(draft, spec, plan)
    origins = plan.origins
    if adopted is not None:
        adopted.explain(draft.reasons)
        origins = origins | dict.fromkeys(adopted.free, "tuned")
    replaced = source_values(draft.spec.system, n_steps=plan.n_steps)
    reasons = (
        replace(reason, origin=origins.get(name, "computed"), source_value=replaced.get(name))
        for name, reason in draft.reasons.items()
    )
    return replace(plan, origins=origins, reasons=tuple(reasons))


def resolve_settings(draft: PlanDraft) -> TrainPlan:
    """Replace every ``auto`` in place, and add what follows from the settings."""
    spec, packing, gpu, choose = draft.spec, draft.packing, draft.gpu, draft.choose
    train, place = packing.train, f"training.{name_of(Training.parallel)}"
    if draft.by_hand:
        place = f"--{name_of(Training.parallel)}"
    precision = choose(
        TrainPlan.precision, *switches.choose_precision(spec, gpu, by_hand=draft.by_hand)
    )
    micro, accumulation, checkpoint = choose_batch(draft)
    global_batch = micro * accumulation * spec.world_size
    per_epoch = -(-train.n_sequences // global_batch)
    n_tokens = train.n_tokens
    steps = choose(
        TrainPlan.n_steps, *switches.choose_steps(spec, per_epoch, tokens_per_epoch=n_tokens)
    )
    warmup = choose(TrainPlan.n_warmup_steps, *switches.choose_warmup(spec, steps))
    attention = choose(TrainPlan.attention, *switches.choose_attention(spec, gpu))
    draft.note(Training.parallel, *switches.choose_parallel(spec, place))
    for setting, choice in switches.choose_loader(spec, packing.packing).items():
        choose(setting, *choice)
    choose(Training.use_tf32, *switches.choose_tf32(spec, gpu))
    compiled = switches.choose_compile(spec, gpu, attention=attention, packing=packing.packing)
    choose(Training.torch_compile, *compiled)
    choose(Training.group_by_length, *switches.choose_grouping(spec, packing.packing))
    draft.chosen.update(
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        save_steps=spec.save_steps or steps,
        eval_steps=spec.eval_steps or per_epoch,
    )
    asked = {name: getattr(spec, name) for name in Training.__struct_fields__}
    # Settings that the plan does not resolve, such as the row length, are passed through.
    origins = spec.origins | {
        name: "computed"
        if draft.chosen.get(name, value) != value
        else spec.origins.get(name, "default")
        for name, value in asked.items()
    }
    return TrainPlan(
        **{**asked, **draft.chosen},
        origins=origins,
        expert=draft.expert,
        hardware=draft.hardware,
        gpu=gpu,
        may_halve_micro_batch=spec.batch_size is None,
        global_batch_sequences=global_batch,
        sequence_length_tokens=packing.sequence_length_tokens,
        n_sequences=train.n_sequences,
        n_steps_per_epoch=per_epoch,
        n_epochs=steps / per_epoch,
        n_decay_steps=min(steps - warmup, math.ceil(spec.lr_decay_ratio * steps)),
        predicted_tokens=round(n_tokens * steps / per_epoch),
        cost=CostPlan(reason=""),
        reasons=(),
        **_predict(draft, micro, checkpoint=checkpoint),
    )


def _predict(draft: PlanDraft, micro: int, *, checkpoint: bool) -> dict[str, Any]:
    if doubts := flops_doubts(draft.facts, draft.spec.lora):
        draft.note(TrainPlan.flops_per_token_model, "approximate", doubts)
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
