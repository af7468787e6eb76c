"""Change settings of a resolved plan by hand, under their manifest names.

The plan is resolved again by the same rules, and predictions for the old one are dropped. Values
that a manifest may not have are rejected here, too, and so are changes without effect.
"""

from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import ConfigError
from expertflow.core.settings import SettingInfo, list_settings, name_of
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import CostPlan, ModelFacts, Origin, PlanSpec, Reason, TrainPlan
from expertflow.plan.resolve import resolve_settings
from expertflow.plan.settings import LoraSpec, Training
from expertflow.plan.switches import check_settings
from expertflow.tokens.records import PackingRecord

LORA = {f"{name_of(Training.lora)}_{s.name}": s for s in list_settings(LoraSpec) if s.by_hand}
# Settings changed by hand: name to value.
Changes = dict[str, Any]
DEFAULT = Training()
LENGTH = {setting.name for setting in list_settings(Training) if "length" in setting.affects}
# Settings whose reasons quote predictions of the old plan, and the replacement text.
QUOTING = {
    name_of(Training.batch_size),
    name_of(Training.gradient_checkpointing),
    name_of(Training.gradient_accumulation_steps),
    name_of(Training.save_steps),
}
TAKEN_OVER = "kept from the plan that was changed by hand"
BUDGETS = {name_of(Training.max_hours), name_of(Training.max_usd)}
NOT_HELD = "not enforced: settings were changed by hand, so nothing is predicted"
FOLLOWS = "follows from the settings changed by hand"


def flags() -> dict[str, SettingInfo]:
    """Return the settings that can be changed by hand, by name; an adapter's as ``lora_r``."""
    plain = {s.name: s for s in list_settings(Training) if s.by_hand and s.kind is not LoraSpec}
    return dict(sorted((plain | LORA).items()))


def override(
    plan: TrainPlan, changes: Changes, *, packing: PackingRecord, facts: ModelFacts
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
        # A plan's total includes the adapter; a draft needs the base model's.
        n_params=plan.n_params_total - (plan.n_params_trainable if plan.lora is not None else 0),
        gpu=plan.gpu,
        by_hand=True,
    )
    new = resolve_settings(draft)
    for name, value in changes.items():
        # The rules may overrule a request: one thread ignores a number of workers.
        if name not in LORA and getattr(new, name) != value:
            why = draft.reasons.get(name, draft.reasons[name_of(TrainPlan.precision)]).because
            raise ConfigError(f"{_flag(name)} {value} has no effect: {why}")
    price, as_of = plan.cost.price_usd_per_hour, plan.cost.price_as_of
    unpredicted = "settings were changed by hand, so nothing is predicted"
    why = f"{unpredicted} and no budget is enforced"
    if new.world_size != plan.world_size:
        # It is unknown here whether the price was per card or for the machine.
        price, as_of = None, None
        why += f"; the price was for world_size {plan.world_size} and is dropped"
    return replace(
        new,
        may_halve_micro_batch=plan.may_halve_micro_batch
        and name_of(Training.batch_size) not in changes,
        predicted_peak_reason=unpredicted,
        cost=CostPlan(
            price_usd_per_hour=price,
            price_as_of=as_of,
            billing_minutes=plan.cost.billing_minutes,
            reason=why,
        ),
        reasons=_reasons(plan, new, draft.reasons, changes),
    )


def _spec(plan: TrainPlan, changes: Changes) -> PlanSpec:
    asked = {name: getattr(plan, name) for name in Training.__struct_fields__}
    # Values derived from the run's length, or from another setting, are derived again.
    by_length = (name_of(Training.save_steps), name_of(Training.eval_steps))
    asked |= {name: None for name in by_length if plan.origins.get(name) == "computed"}
    # A plan has 0 where there are no workers; a manifest may not set it.
    ahead = plan.dataloader_prefetch_factor or DEFAULT.dataloader_prefetch_factor
    asked.update(
        attention=None if plan.attention == "packed" else plan.attention,
        # Already in the attention above: eager where this was false.
        use_sdpa=True,
        dataloader_prefetch_factor=ahead,
    )
    # A new length replaces the old one, which may be in another setting.
    if not LENGTH.isdisjoint(changes):
        asked |= {name: getattr(DEFAULT, name) for name in LENGTH}
    asked |= {name: value for name, value in changes.items() if name not in LORA}
    asked.update(lora=_lora(plan, changes))
    # The adapter's settings count as one setting.
    # lora_r, lora_alpha -> lora
    given = {name_of(Training.lora) if name in LORA else name for name in changes}
    origins: dict[str, Origin] = {**plan.origins, **dict.fromkeys(given, "command line")}
    return PlanSpec(**asked, origins=origins, hardware=plan.hardware)


def _lora(plan: TrainPlan, changes: Changes) -> LoraSpec | None:
    wanted = {LORA[name].name: value for name, value in changes.items() if name in LORA}
    if changes.get(name_of(Training.method), plan.method) == "full":
        if wanted:
            flag = _flag(f"lora.{next(iter(wanted))}")
            raise ConfigError(f"method full has no adapter; drop {flag}")
        return None
    return replace(plan.lora or LoraSpec(), **wanted)


def _reasons(
    old: TrainPlan, new: TrainPlan, drafted: dict[str, Reason], changes: Changes
) -> tuple[Reason, ...]:
    is_longer = (old.n_steps, old.n_steps_per_epoch) != (new.n_steps, new.n_steps_per_epoch)
    # Derived from the length of the run.
    counts = {name_of(TrainPlan.n_steps), name_of(TrainPlan.n_warmup_steps)} if is_longer else ()
    reasons = []
    for reason in old.reasons:
        setting = reason.setting
        if setting in changes:
            continue
        found = drafted.get(setting)
        value = found.value if found else str(getattr(new, setting, reason.value))
        if found is not None and setting == name_of(Training.parallel):
            reason = found
        elif setting in BUDGETS:
            reason = replace(reason, because=NOT_HELD)
        elif value != reason.value or (found and setting in counts):
            reason = Reason(setting=setting, value=value, because=FOLLOWS)
        elif setting in QUOTING:
            reason = replace(reason, because=TAKEN_OVER)
        reasons.append(reason)
    given = (
        Reason(setting=n, value=str(changes[n]), because="set by hand", origin="command line")
        for n in changes
    )
    return (*reasons, *sorted(given, key=lambda reason: reason.setting))


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-').replace('.', '-')}"
