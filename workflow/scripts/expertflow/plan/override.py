"""Change a resolved plan by hand: its settings, under the names that they have in a manifest.

The plan is resolved again by its own rules; what was predicted for the old one is dropped, not
kept. What a manifest may not ask for is refused here too, and so is what would have no effect.
"""

from typing import Any

from msgspec.structs import asdict, fields, replace

from expertflow.core.errors import ConfigError
from expertflow.core.settings import SettingInfo, list_settings
from expertflow.plan.contradictions import check_settings
from expertflow.plan.cost_records import CostPlan
from expertflow.plan.draft import Draft
from expertflow.plan.records import ModelFacts, PlanSpec, Reason, TrainPlan
from expertflow.plan.resolve import resolve_settings
from expertflow.plan.settings import LoraSpec, Training
from expertflow.tokens.records import PackingRecord

LORA = {f"lora_{setting.name}": setting for setting in list_settings(LoraSpec)}
DEFAULTS = {setting.name: setting.default for setting in list_settings(Training)}
LENGTH = {setting.name for setting in list_settings(Training) if "length" in setting.affects}
# Settings whose reasons quote what the old plan predicted, and what then stands in their place.
QUOTING = ("batch_size", "gradient_checkpointing", "gradient_accumulation_steps", "save_steps")
TAKEN_OVER = "taken over from the plan that was changed by hand"
BUDGETS = ("max_hours", "max_usd")
NOT_HELD = "not held: settings were changed by hand, so nothing is predicted"
FOLLOWS = "follows from what was given by hand"
# What of a cost still holds.
PRICE = ("price_usd_per_hour", "price_as_of", "billing_minutes")


def flags() -> dict[str, SettingInfo]:
    """Return the settings that can be changed by hand, by name; an adapter's as ``lora_r``."""
    plain = {s.name: s for s in list_settings(Training) if s.by_hand and s.kind is not LoraSpec}
    return dict(sorted((plain | LORA).items()))


def override(
    plan: TrainPlan, changes: dict[str, Any], *, packing: PackingRecord, facts: ModelFacts
) -> TrainPlan:
    """Return the plan with some settings changed.

    Raises:
        ConfigError: settings contradict each other, or one would have no effect.
    """
    if not changes:
        return plan
    spec = _spec(plan, changes)
    check_settings(spec, name=_flag)
    n_params = plan.n_params_total - (plan.n_params_trainable if plan.lora is not None else 0)
    draft = Draft(plan.expert, spec, packing, facts, n_params, plan.gpu, by_hand=True)
    new = resolve_settings(draft)
    _check_effect(new, draft, changes)
    return replace(
        new,
        may_halve_micro_batch=plan.may_halve_micro_batch and "batch_size" not in changes,
        predicted_peak_reason="settings were changed by hand, so nothing is predicted",
        cost=_cost(plan, new),
        reasons=_reasons(plan, new, draft, changes),
    )


def _spec(plan: TrainPlan, changes: dict[str, Any]) -> PlanSpec:
    """Return what a manifest would say to get the plan, with the changes."""
    asked = {name: getattr(plan, name) for name in DEFAULTS}
    # What followed from the run's length, or from another setting, follows again.
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
    return PlanSpec(
        **asked,
        origins={**plan.origins, **dict.fromkeys(_own(changes), "command line")},
        hardware=plan.hardware,
        gpu_table=(),
        prices={},
        price_usd_per_hour=None,
        price_as_of=None,
        billing_minutes=None,
        system=None,
        claims=(),
        compare=(),
    )


def _own(changes: dict[str, Any]) -> set[str]:
    """Name the settings that are changed; those of an adapter are one."""
    return {"lora" if name in LORA else name for name in changes}


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


def _check_effect(plan: TrainPlan, draft: Draft, changes: dict[str, Any]) -> None:
    """Refuse what the plan's rules do not take.

    Raises:
        ConfigError: gives their reason.
    """
    because = {reason.setting: reason.because for reason in draft.reasons}
    for name, value in changes.items():
        if name not in LORA and getattr(plan, name) != value:
            why = because.get(name) or because["precision"]
            raise ConfigError(f"{_flag(name)} {value} has no effect: {why}")


def _reasons(
    old: TrainPlan, new: TrainPlan, draft: Draft, changes: dict[str, Any]
) -> tuple[Reason, ...]:
    """Return the reasons that still hold, and new ones for what was changed and what follows."""
    drafted = {reason.setting: reason for reason in draft.reasons}
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
        elif value != reason.value or (found and _is_count(setting) and _moved(old, new)):
            reason = Reason(setting=setting, value=value, because=FOLLOWS)
        elif setting in QUOTING:
            reason = replace(reason, because=TAKEN_OVER)
        reasons.append(reason)
    given = (
        Reason(setting=n, value=str(changes[n]), because="given by hand", origin="command line")
        for n in changes
    )
    return (*reasons, *sorted(given, key=lambda reason: reason.setting))


def _is_count(setting: str) -> bool:
    """Tell whether a value is worked out from the length of the run."""
    return setting in ("n_steps", "n_warmup_steps")


def _moved(old: TrainPlan, new: TrainPlan) -> bool:
    return (old.n_steps, old.n_steps_per_epoch) != (new.n_steps, new.n_steps_per_epoch)


def _cost(old: TrainPlan, new: TrainPlan) -> CostPlan:
    """Keep the price alone, as nothing is predicted."""
    kept = {name: value for name, value in asdict(old.cost).items() if name in PRICE}
    nulls: dict[str, Any] = {f.name: None for f in fields(CostPlan) if f.name not in kept}
    reason = "settings were changed by hand, so nothing is predicted and no budget is held"
    if new.world_size != old.world_size:
        # Whether the price was one card's times their number or a machine's is not known here.
        kept |= {"price_usd_per_hour": None, "price_as_of": None}
        reason += f"; the price was for world_size {old.world_size} and is dropped"
    return CostPlan(**{**nulls, **kept, "calibrated": False, "reason": reason})


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-').replace('.', '-')}"
