"""Change a resolved plan by hand: every hyper-parameter, under the name it has in a manifest.

What follows from a changed setting is worked out again (global batch, steps, warm-up); what was
predicted for the old one is dropped, not kept. What a manifest may not ask for is refused here too.
"""

import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec.structs import fields, replace

from expertflow.core.errors import ConfigError
from expertflow.plan.flops import adapter_weights, flops_per_token
from expertflow.plan.records import LoaderPlan, LoraSpec, ModelFacts, PlanSpec, Reason, TrainPlan
from expertflow.plan.schedule import steps_per_epoch
from expertflow.plan.switches import check_parallel
from expertflow.tokens.records import PackingRecord

# Names of a manifest whose field in the plan is called otherwise.
RENAMED = {
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "n_accumulation_steps",
    "gradient_checkpointing": "checkpoint_activations",
    "max_steps": "n_steps",
    "warmup_steps": "n_warmup_steps",
    "lr_decay_steps": "n_decay_steps",
}
LOADER = {
    "loader": "kind",
    "dataloader_num_workers": "n_workers",
    "dataloader_prefetch_factor": "n_prefetch_batches",
    "dataloader_persistent_workers": "persistent_workers",
}
# What the plan's reasons call the loader's settings, where it is another name than the manifest's.
LOADER_REASONS = {
    "dataloader_num_workers": "n_loader_workers",
    "dataloader_prefetch_factor": "n_prefetch_batches",
    "dataloader_persistent_workers": "persistent_workers",
}
LORA = {f"lora_{field.name}": field.name for field in fields(LoraSpec)}
OWN = ("num_train_epochs", "precision")
# Settings whose reasons quote what the old plan predicted, and what then stands in their place.
QUOTING = ("micro_batch_size", "checkpoint_activations", "n_accumulation_steps", "save_steps")
TAKEN_OVER = "taken over from the plan that was changed by hand"
BUDGETS = ("max_hours", "max_usd")
NOT_HELD = "not held: settings were changed by hand, so nothing is predicted"
# Settings that decide about data, hardware or money, or that a resolved plan has no more use for.
NOT_BY_HAND = {
    "lora", "target_tokens", "min_epochs", "max_epochs", "lr_decay_ratio", "warmup_ratio",
    "warmup_steps_min", "warmup_steps_max", "override_min_warmup", "bf16", "fp16", "use_sdpa",
    "group_by_length", "gpu_memory_threshold_small_gb", "gpu_memory_threshold_medium_gb",
    "gpu_memory_threshold_large_gb", "hardware", "gpu_table", "prices", "price_usd_per_hour",
    "price_as_of", "billing_minutes", "max_usd", "max_hours", "system", "claims", "compare",
    "may_drop_budgets", "tuned",
}  # fmt: skip


def flags() -> dict[str, Any]:
    """Give the type of every hyper-parameter that can be set by hand, by its name."""
    spec, plan = get_type_hints(PlanSpec), get_type_hints(TrainPlan)
    own = {name: kind for name, kind in spec.items() if name not in NOT_BY_HAND}
    own["num_train_epochs"], own["precision"] = float, plan["precision"]
    own |= {name: plan[field] for name, field in RENAMED.items() if name not in own}
    lora = get_type_hints(LoraSpec)
    own |= {name: lora[field] for name, field in LORA.items()}
    return {name: _plain(kind) for name, kind in sorted(own.items())}


def override(
    plan: TrainPlan, changes: dict[str, Any], *, packing: PackingRecord, facts: ModelFacts
) -> TrainPlan:
    """Give the plan with some hyper-parameters changed.

    Raises:
        ConfigError: settings contradict each other, e.g. warm-up would not end before the run does.
    """
    if not changes:
        return plan
    direct = {RENAMED.get(k, k): v for k, v in changes.items() if k not in (*LOADER, *LORA, *OWN)}
    if "precision" in changes:
        direct["precision"] = changes["precision"]
    new = replace(plan, **direct, loader=_loader(plan, changes), lora=_lora(plan, changes))
    new = _counted(plan, new, changes)
    _check(new)
    return replace(
        _without_forecast(plan, new, packing, facts), reasons=_reasons(plan, new, changes)
    )


def _counted(old: TrainPlan, new: TrainPlan, changes: dict[str, Any]) -> TrainPlan:
    """Work out batch and steps again; intervals that were the whole run or an epoch stay that."""
    batch = new.micro_batch_size * new.n_accumulation_steps * new.world_size
    per_epoch = steps_per_epoch(new.n_sequences, batch)
    steps = new.n_steps
    longer = "num_train_epochs" in changes or per_epoch != old.n_steps_per_epoch
    if longer and "max_steps" not in changes:
        epochs = changes.get("num_train_epochs", old.n_epochs)
        steps = max(1, math.ceil(epochs * per_epoch - 1e-9))
    scale = steps / old.n_steps
    intervals: dict[str, Any] = {}
    if "save_steps" not in changes and old.save_steps == old.n_steps:
        intervals["save_steps"] = steps
    if "eval_steps" not in changes and old.eval_steps == old.n_steps_per_epoch:
        intervals["eval_steps"] = per_epoch
    warmup = new.n_warmup_steps
    if "warmup_steps" not in changes:
        warmup = intervals["n_warmup_steps"] = int(old.n_warmup_steps * scale)
    if "lr_decay_steps" not in changes:
        decay = math.ceil(old.n_decay_steps * scale)
        intervals["n_decay_steps"] = min(decay, steps - warmup)
    return replace(
        new,
        global_batch_sequences=batch,
        n_steps_per_epoch=per_epoch,
        n_steps=steps,
        n_epochs=steps / per_epoch,
        may_halve_micro_batch=new.may_halve_micro_batch and "batch_size" not in changes,
        **intervals,
    )


def _check(plan: TrainPlan) -> None:
    """Refuse settings that contradict each other, in the words of the command line."""
    left = plan.n_steps - plan.n_warmup_steps
    if left <= 0:
        raise ConfigError(
            f"warm-up of {plan.n_warmup_steps} steps is not below the {plan.n_steps} steps of the"
            " run; lower --warmup-steps"
        )
    if plan.n_decay_steps > left:
        raise ConfigError(
            f"--lr-decay-steps {plan.n_decay_steps}: warm-up leaves {left} of the {plan.n_steps}"
            " steps; lower it"
        )
    check_parallel(plan, "--parallel")
    if plan.min_delta and plan.patience is None:
        raise ConfigError(
            f"--min-delta {plan.min_delta:g} has no effect without patience; give --patience, or"
            " drop it"
        )
    _check_loader(plan.loader)
    if plan.lora is not None and "lm_head" in plan.lora.targets:
        raise ConfigError(
            "--lora-targets names lm_head, which the loss reads directly; leave it out"
        )


def _check_loader(loader: LoaderPlan) -> None:
    if loader.kind == "thread" and loader.n_workers:
        raise ConfigError(
            f"--dataloader-num-workers {loader.n_workers}: the loader is the thread, which needs"
            " none; give --loader workers, or drop it"
        )
    if loader.persistent_workers and not loader.n_workers:
        raise ConfigError(
            "--dataloader-persistent-workers: there are no workers to keep; give"
            " --dataloader-num-workers, or drop it"
        )
    if not loader.n_prefetch_batches and (loader.kind == "thread" or loader.n_workers):
        raise ConfigError(
            "the plan's loader makes every batch when it is asked for; give"
            " --dataloader-prefetch-factor as well"
        )


def _reasons(old: TrainPlan, new: TrainPlan, changes: dict[str, Any]) -> tuple[Reason, ...]:
    """Give the reasons that still hold, and new ones for what was changed and what follows."""
    by_hand = {name: (RENAMED | LOADER_REASONS).get(name, name) for name in sorted(changes)}
    moved = old.n_steps != new.n_steps or old.n_steps_per_epoch != new.n_steps_per_epoch
    reasons = []
    for reason in old.reasons:
        setting = reason.setting
        if setting in by_hand.values():
            continue
        if setting == "parallel" and "world_size" in changes:
            reason = check_parallel(new)
        elif (value := _value(new, setting)) != _value(old, setting) or (
            moved and setting in ("n_steps", "n_warmup_steps")
        ):
            because = "follows from what was given by hand"
            reason = Reason(setting=setting, value=str(value), because=because)
        elif setting in QUOTING:
            reason = replace(reason, because=TAKEN_OVER)
        elif setting in BUDGETS:
            reason = replace(reason, because=NOT_HELD)
        reasons.append(reason)
    for name in by_hand:
        value = str(changes[name])
        reasons.append(Reason(setting=name, value=value, because="given by hand"))
    return tuple(reasons)


def _value(plan: TrainPlan, setting: str) -> object:
    """Give the value in the plan of what its reasons call ``setting``."""
    if setting in LOADER_REASONS.values() or setting == "loader":
        field = {"n_loader_workers": "n_workers", "loader": "kind"}.get(setting, setting)
        return getattr(plan.loader, field)
    # A budget has its reason in the plan, and no place.
    return getattr(plan, setting, None)


def _without_forecast(
    old: TrainPlan, plan: TrainPlan, packing: PackingRecord, facts: ModelFacts
) -> TrainPlan:
    """Count parameters and FLOPs again, and predict nothing."""
    train = packing.train
    work = flops_per_token(
        facts,
        lora=plan.lora,
        mean_context_tokens=train.sum_len_sq / (2 * train.n_tokens),
        supervised_fraction=train.n_target_tokens / train.n_tokens,
        checkpoint_activations=plan.checkpoint_activations,
    )
    base = old.n_params_total - (old.n_params_trainable if old.lora is not None else 0)
    adapter = adapter_weights(facts, plan.lora)
    kept = ("price_usd_per_hour", "price_as_of", "billing_minutes", "reason", "calibrated")
    nulls: dict[str, Any] = {f.name: None for f in fields(plan.cost) if f.name not in kept}
    reason = "settings were changed by hand, so nothing is predicted"
    unpriced = f"{reason} and no budget is held"
    cost = replace(plan.cost, **nulls, calibrated=False, reason=unpriced)
    if plan.world_size != old.world_size:
        # Whether the price was one card's times their number or a machine's is not known here.
        reason_cost = f"{unpriced}; the price was for world_size {old.world_size} and is dropped"
        cost = replace(cost, price_usd_per_hour=None, price_as_of=None, reason=reason_cost)
    return replace(
        plan,
        n_params_total=base + adapter,
        n_params_trainable=adapter if plan.lora is not None else base,
        flops_per_token_model=work.model,
        flops_per_token_hardware=work.hardware,
        predicted_tokens=round(train.n_tokens * plan.n_epochs),
        predicted_peak_bytes=None,
        predicted_peak_reason=reason,
        next_micro_batch_peak_bytes=None,
        without_checkpointing_peak_bytes=None,
        memory=None,
        options=(),
        claims=(),
        cost=cost,
    )


def _loader(plan: TrainPlan, changes: dict[str, Any]) -> LoaderPlan:
    given = {LOADER[k]: v for k, v in changes.items() if k in LOADER}
    loader = replace(plan.loader, **given)
    # What the plan's own workers brought goes with them; what is given by hand is left to _check.
    if loader.kind == "thread":
        loader = replace(loader, n_workers=given.get("n_workers", 0))
    if loader.n_workers == 0:
        loader = replace(loader, persistent_workers=given.get("persistent_workers", False))
    return loader


def _lora(plan: TrainPlan, changes: dict[str, Any]) -> LoraSpec | None:
    wanted = {LORA[name]: value for name, value in changes.items() if name in LORA}
    if changes.get("method", plan.method) == "full":
        if wanted:
            raise ConfigError(f"method full has no adapter; drop --lora-{next(iter(wanted))}")
        return None
    if plan.lora is None:
        missing = [name for name in LORA.values() if name not in wanted]
        if missing:
            flag = missing[0].replace("_", "-")
            raise ConfigError(f"the plan has no adapter settings; give --lora-{flag} as well")
        return LoraSpec(**wanted)
    return replace(plan.lora, **wanted)


def _plain(kind: Any) -> Any:
    """Take null out of a type."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [part for part in get_args(kind) if part is not type(None)]
        return kinds[0]
    return kind


def choices(kind: Any) -> tuple[Any, ...] | None:
    """Give the values that a type allows, where it lists them."""
    return get_args(kind) if get_origin(kind) is Literal else None
