"""Take over what a search found fastest, where it is of this run and left open there."""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.plan.cost_records import MemoryTrace
from expertflow.plan.draft import Draft
from expertflow.plan.records import PlanSpec, Reason, TrainPlan
from expertflow.plan.settings import LoraSpec
from expertflow.plan.tuning_records import TunedSettings, TuningRecord, TuningTrial

# What is less apart than this is a tie.
TIE_FRACTION = 0.02
# Settings of a search, as manifests name them.
SEARCHED = TunedSettings.__struct_fields__


class Tuning(Record, frozen=True, kw_only=True):
    """A search's record, and what it takes to plan by it.

    ``cpu`` names the processor of this machine, null where unknown or of no matter. ``trace``
    traces a step with another route of attention; null where there is no card.
    """

    record: TuningRecord
    cpu: str | None
    trace: Callable[[str], MemoryTrace | None]


class Chosen(Record, frozen=True, kw_only=True):
    """Settings of a plan with those of a search in the place of what was left open."""

    spec: PlanSpec
    settings: TunedSettings
    because: str
    free: frozenset[str]
    overruled: dict[str, str]


def with_tuning(
    draft: Draft, plan: TrainPlan, tuning: Tuning | None, *, resolve: Callable[[Draft], TrainPlan]
) -> tuple[TrainPlan, Chosen | None]:
    """Resolve again with what a search found, where there is one; ``plan`` is made without."""
    if tuning is None:
        return plan, None
    packing, model_type = draft.packing.packing, draft.facts.model_type
    key = tuning_key(plan, model_type=model_type, packing=packing, cpu=tuning.cpu)
    chosen = choose(tuning.record, plan, draft.spec, key=key)
    if isinstance(chosen, str):
        draft.because("tuned", draft.spec.tuned, chosen)
        return plan, None
    trace = draft.trace
    if chosen.settings.attention != plan.attention:
        trace = tuning.trace(chosen.settings.attention)
    again = replace(draft, spec=chosen.spec, trace=trace, reasons=[])
    # As the manifest's own spec has it: its micro-batch is still automatic, or not.
    plan = replace(resolve(again), may_halve_micro_batch=plan.may_halve_micro_batch)
    draft.reasons = again.reasons
    draft.because("tuned", draft.spec.tuned, "counts where the manifest leaves a setting open")
    return plan, chosen


def explained(reasons: Iterable[Reason], chosen: Chosen | None) -> list[Reason]:
    """Say of settings that a search decided that it did."""
    if chosen is None:
        return list(reasons)
    return [_explained(reason, chosen) for reason in reasons]


def _explained(reason: Reason, chosen: Chosen) -> Reason:
    if reason.setting in chosen.free:
        # Behind the micro-batch stands what memory is predicted for it.
        _, mark, sizes = reason.because.partition("; ")
        rest = f"{mark}{sizes}" if reason.setting == "batch_size" else ""
        return replace(reason, because=f"tuned: {chosen.because}{rest}")
    if reason.setting in chosen.overruled:
        return replace(reason, because=f"{reason.because}; {chosen.overruled[reason.setting]}")
    return reason


def tuning_key(plan: TrainPlan, *, model_type: str, packing: str, cpu: str | None) -> str:
    """Name what a search holds for, in words that can be compared.

    ``plan`` is as it would be without a search; ``cpu`` names the processor, null where unknown.
    """
    parts = (
        f"cpu {cpu or 'of unknown name'}" if plan.gpu is None else plan.hardware,
        f"{plan.world_size} x {plan.parallel}" if plan.world_size > 1 else "1 process",
        f"{model_type} of {plan.n_params_total:,} parameters",
        plan.method + _adapter(plan.lora),
        plan.optim,
        f"rows of {plan.sequence_length_tokens} tokens",
        "unpacked rows" if packing == "none" else "packed rows",
        f"{plan.global_batch_sequences} rows a step",
        plan.precision + (" with TF32" if plan.use_tf32 else ""),
        f"label smoothing {plan.label_smoothing_factor:g}",
        "deterministic kernels" if plan.deterministic else "any kernels",
    )
    # A name may hold what separates.
    return "; ".join(part.replace(";", ",") for part in parts)


def _adapter(lora: LoraSpec | None) -> str:
    """Say of an adapter what decides how long a step takes."""
    if lora is None:
        return ""
    kind, targets = " DoRA" if lora.use_dora else "", " ".join(sorted(lora.targets))
    return f" r {lora.r}{kind} dropout {lora.dropout:g} on {targets}"


def settings_of(plan: TrainPlan) -> TunedSettings:
    """Give those settings of a plan that a search varies."""
    return TunedSettings(**{name: getattr(plan, name) for name in SEARCHED})


def free_settings(spec: PlanSpec) -> frozenset[str]:
    """Name the settings of a search that a manifest leaves open.

    Micro-batch and accumulation are one choice, as their product is kept: either of them names it.
    """
    is_open = {
        "batch_size": spec.batch_size is None and spec.gradient_accumulation_steps is None,
        "gradient_checkpointing": spec.gradient_checkpointing is None,
        "attention": spec.attention is None and spec.use_sdpa,
        "torch_compile": spec.torch_compile is None,
        "n_threads": spec.n_threads is None,
        "loader": spec.loader is None,
    }
    together = {"batch_size": "gradient_accumulation_steps", "loader": "dataloader_num_workers"}
    names = {name for name, left in is_open.items() if left}
    return frozenset(names | {together[name] for name in names & together.keys()})


def agrees(settings: TunedSettings, default: TunedSettings, free: frozenset[str]) -> bool:
    """Tell whether settings differ from the default's in nothing that the manifest names."""
    return all(getattr(settings, n) == getattr(default, n) for n in SEARCHED if n not in free)


def choose(record: TuningRecord, plan: TrainPlan, spec: PlanSpec, *, key: str) -> Chosen | str:
    """Choose by a search for a plan that was made without it, or say why the search is left out."""
    if record.key != key:
        theirs, ours = record.key.split("; "), key.split("; ")
        pairs = zip(theirs, ours, strict=False)
        other = next((f"{t}, not {o}" for t, o in pairs if t != o), record.key)
        return f"left out: it was tuned for another run ({other})"
    default, free = settings_of(plan), free_settings(spec)
    found = _picked(record, default, free)
    if found is None:
        return "left out: nothing that was tried and agrees with the manifest could be run"
    n_tried = sum(trial.outcome in ("measured", "given up") for trial in record.trials)
    where = record.gpu_name or record.hardware
    return Chosen(
        spec=replace(spec, **_named(found, spec, free)),
        settings=found,
        because=f"{_place(record, found, default)} of {n_tried} on {where}{_gain(record, found)}",
        free=free,
        overruled=_overruled(record, found, free),
    )


def _picked(
    record: TuningRecord, default: TunedSettings, free: frozenset[str]
) -> TunedSettings | None:
    """Give the best, or the fastest trial that agrees with a manifest that names more."""
    if record.best is not None and agrees(record.best, default, free):
        return record.best
    rates = {
        trial.settings: trial.tokens_per_s
        for trial in measured(record.trials)
        if trial.tokens_per_s and agrees(trial.settings, default, free)
    }
    if not rates:
        return None
    fastest = max(rates, key=lambda settings: rates[settings])
    is_tie = rates.get(default, 0.0) * (1 + TIE_FRACTION) >= rates[fastest]
    return default if is_tie else fastest


def measured(trials: Iterable[TuningTrial]) -> list[TuningTrial]:
    """Keep the trials whose steps were all timed."""
    return [trial for trial in trials if trial.outcome == "measured"]


def _named(found: TunedSettings, spec: PlanSpec, free: frozenset[str]) -> dict[str, Any]:
    """Give what a manifest would have to say to get these settings."""
    named = {name: getattr(found, name) for name in SEARCHED if name in free}
    if named.get("attention") == "packed":
        named["attention"] = spec.attention
    return named


def _place(record: TuningRecord, found: TunedSettings, default: TunedSettings) -> str:
    if found == default == record.best and record.gain is None:
        return "the default, as too few pairs of it and a faster trial were timed to be certain,"
    if found == default:
        return "the default, which none was faster than by 2 %,"
    return "fastest" if found == record.best else "fastest that agrees with the manifest"


def _gain(record: TuningRecord, found: TunedSettings) -> str:
    """Say how much faster it is: by the pairs where it is the best, else by single trials."""
    if found == record.default:
        return ""
    if found == record.best:
        if record.gain is None:
            return ""
        between = (
            "" if record.gain_low is None else f" [{record.gain_low:.2f}, {record.gain_high:.2f}]"
        )
        return f", {record.gain:.2f} times the default{between}"
    ratio = _ratio(record, found)
    return "" if ratio is None else f", {ratio:.2f} times the default in one trial each"


def _overruled(record: TuningRecord, found: TunedSettings, free: frozenset[str]) -> dict[str, str]:
    """Say of settings that the manifest names where another value was faster in the search."""
    trials = [trial for trial in measured(record.trials) if trial.tokens_per_s]
    fastest = max(trials, key=lambda trial: trial.tokens_per_s or 0.0, default=None)
    if fastest is None or (ratio := _ratio(record, fastest.settings)) is None:
        return {}
    return {
        name: f"wins over tuning, whose fastest trial had {value} and {ratio:.2f} times the"
        " default's speed"
        for name in SEARCHED
        if name not in free and (value := getattr(fastest.settings, name)) != getattr(found, name)
    }


def _ratio(record: TuningRecord, settings: TunedSettings) -> float | None:
    rates = {trial.settings: trial.tokens_per_s for trial in measured(record.trials)}
    mine, default = rates.get(settings), rates.get(record.default)
    return mine / default if mine and default else None
