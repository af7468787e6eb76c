"""Change settings of a resolved plan by hand, under their manifest names.

The plan is resolved again by its own rules, and predictions for the old one are dropped. What a
manifest may not ask for is rejected here too, and so are changes without effect.
"""

from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import ConfigError
from expertflow.core.settings import SettingInfo, list_settings
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import CostPlan, ModelFacts, Origin, PlanSpec, Reason, TrainPlan
from expertflow.plan.resolve import resolve_settings
from expertflow.plan.settings import LoraSpec, Training
from expertflow.plan.switches import check_settings
from expertflow.tokens.records import PackingRecord

LORA = {f"lora_{setting.name}": setting for setting in list_settings(LoraSpec)}
DEFAULTS = {setting.name: setting.default for setting in list_settings(Training)}
LENGTH = {setting.name for setting in list_settings(Training) if "length" in setting.affects}
# Settings whose reasons quote predictions of the old plan, and the replacement text.
QUOTING = ("batch_size", "gradient_checkpointing", "gradient_accumulation_steps", "save_steps")
TAKEN_OVER = "taken over from the plan that was changed by hand"
BUDGETS = ("max_hours", "max_usd")
NOT_HELD = "not held: settings were changed by hand, so nothing is predicted"
FOLLOWS = "follows from what was given by hand"


def flags() -> dict[str, SettingInfo]:
    """Return the settings that can be changed by hand, by name; an adapter's as ``lora_r``."""
    plain = {s.name: s for s in list_settings(Training) if s.by_hand and s.kind is not LoraSpec}
    return dict(sorted((plain | LORA).items()))


def override(
    plan: TrainPlan, changes: dict[str, Any], *, packing: PackingRecord, facts: ModelFacts
) -> TrainPlan:
    """Return the changed plan; raise ConfigError for a contradiction or a change without effect."""
    if not changes:
        return plan
    spec = _spec(plan, changes)
    check_settings(spec, name=_flag)
    draft = PlanDraft(
        expert=plan.expert,
        spec=spec,
        packing=packing,
        facts=facts,
        n_params=plan.n_params_total - (plan.n_params_trainable if plan.lora is not None else 0),
        gpu=plan.gpu,
        by_hand=True,
    )
    new = resolve_settings(draft)
    for name, value in changes.items():
        if name not in LORA and getattr(new, name) != value:
            why = draft.reasons.get(name, draft.reasons["precision"]).because
            raise ConfigError(f"{_flag(name)} {value} has no effect: {why}")
    price, as_of = plan.cost.price_usd_per_hour, plan.cost.price_as_of
    why = "settings were changed by hand, so nothing is predicted and no budget is held"
    if new.world_size != plan.world_size:
        # It is unknown here whether the price was per card or for the machine.
        price, as_of = None, None
        why += f"; the price was for world_size {plan.world_size} and is dropped"
    return replace(
        new,
        may_halve_micro_batch=plan.may_halve_micro_batch and "batch_size" not in changes,
        predicted_peak_reason="settings were changed by hand, so nothing is predicted",
        cost=CostPlan(
            price_usd_per_hour=price,
            price_as_of=as_of,
            billing_minutes=plan.cost.billing_minutes,
            reason=why,
        ),
        reasons=_reasons(plan, new, draft.reasons, changes),
    )


def _spec(plan: TrainPlan, changes: dict[str, Any]) -> PlanSpec:
    asked = {name: getattr(plan, name) for name in DEFAULTS}
    # Values derived from the run's length, or from another setting, are derived again.
    asked["save_steps"] = None if plan.save_steps == plan.n_steps else plan.save_steps
    asked["eval_steps"] = None if plan.eval_steps == plan.n_steps_per_epoch else plan.eval_steps
    asked["attention"] = None if plan.attention == "packed" else plan.attention
    asked["use_sdpa"] = True
    if not plan.dataloader_prefetch_factor:
        asked["dataloader_prefetch_factor"] = DEFAULTS["dataloader_prefetch_factor"]
    if not LENGTH.isdisjoint(changes):
        asked |= {name: DEFAULTS[name] for name in LENGTH}
    asked |= {name: value for name, value in changes.items() if name not in LORA}
    asked["lora"] = _lora(plan, changes)
    # The adapter's settings count as one setting.
    given = {"lora" if name in LORA else name for name in changes}
    told: dict[str, Origin] = dict.fromkeys(given, "command line")
    return PlanSpec(**asked, origins={**plan.origins, **told}, hardware=plan.hardware)


def _lora(plan: TrainPlan, changes: dict[str, Any]) -> LoraSpec | None:
    wanted = {LORA[name].name: value for name, value in changes.items() if name in LORA}
    if changes.get("method", plan.method) == "full":
        if wanted:
            flag = _flag(f"lora.{next(iter(wanted))}")
            raise ConfigError(f"method full has no adapter; drop {flag}")
        return None
    if plan.lora is not None:
        return replace(plan.lora, **wanted)
    missing = [setting.name for setting in LORA.values() if setting.name not in wanted]
    if missing:
        flag = _flag(f"lora.{missing[0]}")
        raise ConfigError(f"the plan has no adapter settings; give {flag} as well")
    return LoraSpec(**wanted)


def _reasons(
    old: TrainPlan, new: TrainPlan, drafted: dict[str, Reason], changes: dict[str, Any]
) -> tuple[Reason, ...]:
    is_longer = (old.n_steps, old.n_steps_per_epoch) != (new.n_steps, new.n_steps_per_epoch)
    # Derived from the length of the run.
    counts = ("n_steps", "n_warmup_steps") if is_longer else ()
    reasons = []
    for reason in old.reasons:
        setting = reason.setting
        if setting in changes:
            continue
        found = drafted.get(setting)
        value = found.value if found else str(getattr(new, setting, reason.value))
        if setting == "parallel" and found is not None:
            reason = found
        elif setting in BUDGETS:
            reason = replace(reason, because=NOT_HELD)
        elif value != reason.value or (found and setting in counts):
            reason = Reason(setting=setting, value=value, because=FOLLOWS)
        elif setting in QUOTING:
            reason = replace(reason, because=TAKEN_OVER)
        reasons.append(reason)
    given = (
        Reason(setting=n, value=str(changes[n]), because="given by hand", origin="command line")
        for n in changes
    )
    return (*reasons, *sorted(given, key=lambda reason: reason.setting))


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-').replace('.', '-')}"
