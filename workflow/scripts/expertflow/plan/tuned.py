"""Where a calibration or a search applies, and what a plan adopts from a search."""

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec.structs import replace

from expertflow.core.records import Record, fill_record
from expertflow.core.settings import name_of
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import MemoryTrace, PlanSpec, Reason, TrainPlan
from expertflow.plan.settings import Loader

# Differences smaller than this are a tie.
TIE_FRACTION = 0.02


class TunedSettings(Record, frozen=True, kw_only=True):
    """The settings searched. All choices have the same global batch, so they train the same."""

    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    attention: str
    torch_compile: bool
    n_threads: int | None
    loader: Loader
    dataloader_num_workers: int


class TuningTrial(Record, frozen=True, kw_only=True):
    """One choice of settings and its outcome; times are null unless steps were timed."""

    settings: TunedSettings
    outcome: Literal["measured", "given up", "left out", "out of memory", "failed"]
    reason: str | None = None
    predicted_peak_bytes: int | None = None
    peak_memory_bytes: int | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    startup_s: float | None = None
    n_timed_steps: int = 0


class TuningRecord(Record, frozen=True, kw_only=True):
    """tuning.json. ``key`` says where it applies: card, model, method, row length, batch.

    ``best`` is null if no choice could run. ``gain`` is the speed of the fastest relative to
    ``default``, the plan's own choice, timed in alternation at the end; after a tie the default is
    the best. It is null if too few turns were timed (likewise) or if the default could not run.
    """

    expert: str
    key: str
    hardware: str
    gpu_name: str | None
    best: TunedSettings | None
    default: TunedSettings
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    trials: tuple[TuningTrial, ...]

    @property
    def rates(self) -> dict[TunedSettings, float]:
        """Tokens per second of each choice that was timed."""
        return {t.settings: t.tokens_per_s for t in select_measured(self.trials) if t.tokens_per_s}

    def speedup(self, settings: TunedSettings) -> float | None:
        ours, default = self.rates.get(settings), self.rates.get(self.default)
        return ours / default if ours and default else None


# Settings of a search, by their manifest names.
SEARCHED = TunedSettings.__struct_fields__


class Tuning(Record, frozen=True, kw_only=True):
    """A search's record, this machine's processor if relevant, and a tracer of attention routes."""

    record: TuningRecord
    cpu: str | None
    trace: Callable[[str], MemoryTrace | None]


class AdoptedSettings(Record, frozen=True, kw_only=True):
    """A plan's settings, with open ones filled in from a search."""

    spec: PlanSpec
    because: str
    free: frozenset[str]
    overruled: dict[str, str]

    def explain(self, reasons: dict[str, Reason]) -> None:
        """Rewrite the reasons of settings where the search decided or disagreed."""
        for name in self.free & reasons.keys():
            # The micro-batch's reason ends with its predicted memory.
            _, mark, sizes = reasons[name].because.partition("; ")
            memory = f"{mark}{sizes}" if name == name_of(TunedSettings.batch_size) else ""
            reasons[name] = replace(reasons[name], because=f"tuned: {self.because}{memory}")
        for name in self.overruled.keys() & reasons.keys():
            because = f"{reasons[name].because}; {self.overruled[name]}"
            reasons[name] = replace(reasons[name], because=because)


def calibration_key(plan: TrainPlan, model_type: str) -> str:
    parts = (
        plan.hardware,
        *_common_parts(plan, model_type),
        f"{plan.batch_size} x {plan.gradient_accumulation_steps} rows a step",
        plan.precision,
        f"attention {plan.attention}",
        f"compiled {plan.torch_compile}",
        f"checkpointing {plan.gradient_checkpointing}",
        f"threads {plan.n_threads}",
    )
    return "; ".join(parts)


def tuning_key(plan: TrainPlan, *, model_type: str, packing: str, cpu: str | None) -> str:
    """Return the key that matches ``plan``, as resolved without a search, to its searches."""
    # Excludes what is searched: micro-batch, attention, compilation, threads, loader.
    lora, more = plan.lora, ""
    if lora is not None:
        more = f" dropout {lora.dropout:g} on {' '.join(sorted(lora.targets))}"
        more += "".join(f", {name} whole" for name in sorted(lora.modules_to_save))
    parts = (
        f"cpu {cpu or 'of unknown name'}" if plan.gpu is None else plan.hardware,
        *_common_parts(plan, model_type, of_adapter=more),
        "unpacked rows" if packing == "none" else "packed rows",
        f"{plan.global_batch_sequences} rows a step",
        plan.precision + (" with TF32" if plan.use_tf32 else ""),
        f"label smoothing {plan.label_smoothing_factor:g}",
        ("deterministic kernels" if plan.deterministic else "any kernels")
        + f", compiled for {plan.torch_compile_mode}" * (plan.torch_compile_mode != "default"),
    )
    # A name may contain the separator.
    return "; ".join(part.replace(";", ",") for part in parts)


def _common_parts(plan: TrainPlan, model_type: str, *, of_adapter: str = "") -> tuple[str, ...]:
    lora = plan.lora
    adapter = "" if lora is None else f" r {lora.r}{' DoRA' if lora.use_dora else ''}"
    return (
        f"{plan.world_size} x {plan.parallel}" if plan.world_size > 1 else "1 process",
        f"{model_type} of {plan.n_params_total:,} parameters",
        f"{plan.method}{adapter}{of_adapter}" + " in pure bf16" * plan.pure_bf16,
        plan.optim,
        f"rows of {plan.sequence_length_tokens} tokens",
    )


def first_difference(theirs: str, ours: str) -> tuple[str, str]:
    # A key of another version may have more or fewer parts.
    pairs = zip(theirs.split("; "), ours.split("; "), strict=False)
    return next(((t, o) for t, o in pairs if t != o), (theirs, ours))


def settings_of(plan: TrainPlan) -> TunedSettings:
    return fill_record(TunedSettings, plan)


def free_settings(spec: PlanSpec) -> frozenset[str]:
    """Return the searched settings that a manifest leaves open.

    Micro-batch and accumulation count as one, as their product is fixed; so do the loader and its
    number of workers, which has a default.
    """
    free = {name for name in SEARCHED if getattr(spec, name) is None}
    rows = {
        name_of(TunedSettings.batch_size),
        name_of(TunedSettings.gradient_accumulation_steps),
    }
    if not rows <= free:
        free -= rows
    if not spec.use_sdpa:
        free -= {name_of(TunedSettings.attention)}
    if spec.loader is None:
        free |= {name_of(TunedSettings.dataloader_num_workers)}
    return frozenset(free)


def is_allowed(settings: TunedSettings, default: TunedSettings, free: frozenset[str]) -> bool:
    return all(getattr(settings, n) == getattr(default, n) for n in SEARCHED if n not in free)


def choose_tuned(tuning: Tuning, plan: TrainPlan, draft: PlanDraft) -> AdoptedSettings | str:
    """Return the settings that a search found for this plan, or why it has none."""
    record, spec, packing = tuning.record, draft.spec, draft.packing.packing
    key = tuning_key(plan, model_type=draft.facts.model_type, packing=packing, cpu=tuning.cpu)
    if record.key != key:
        other, own = first_difference(record.key, key)
        return f"ignored: it was tuned for another run ({other}, not {own})"
    default, free = settings_of(plan), free_settings(spec)
    found, rates, overruled = record.best, record.rates, {}
    if found is None or not is_allowed(found, default, free):
        allowed = {s: rate for s, rate in rates.items() if is_allowed(s, default, free)}
        if not allowed:
            return "ignored: no trial that agrees with the manifest could run"
        found = max(allowed, key=lambda settings: allowed[settings])
        # A tie goes to the plan's own choice.
        if allowed.get(default, 0.0) * (1 + TIE_FRACTION) >= allowed[found]:
            found = default
    filled = {name: getattr(found, name) for name in SEARCHED if name in free}
    attention = name_of(TunedSettings.attention)
    # A manifest cannot set packed: it is what null means.
    if filled.get(attention) == "packed":
        filled[attention] = spec.attention
    fastest = max(rates, key=lambda settings: rates[settings], default=None)
    if fastest is not None and (ratio := record.speedup(fastest)) is not None:
        # The manifest's settings stay, even if another value was faster.
        overruled = {
            name: f"wins over tuning, whose fastest trial had {value} and {ratio:.2f} times the"
            " default's speed"
            for name in SEARCHED
            if name not in free and (value := getattr(fastest, name)) != getattr(found, name)
        }
    because = _because(record, found, default)
    return AdoptedSettings(
        spec=replace(spec, **filled), because=because, free=free, overruled=overruled
    )


def select_measured(trials: Iterable[TuningTrial]) -> list[TuningTrial]:
    return [trial for trial in trials if trial.outcome == "measured"]


def _because(record: TuningRecord, found: TunedSettings, default: TunedSettings) -> str:
    """Return the choice, out of how many, and its speedup, from paired turns if it is the best."""
    place = "fastest" if found == record.best else "fastest that agrees with the manifest"
    if found == default == record.best and record.gain is None:
        place = "the default, because too few pairs with a faster trial were timed to be certain,"
    elif found == default:
        place = "the default, which no trial measurably beat by 2 %,"
    # The other outcomes have no time to compare.
    n_tried = sum(trial.outcome in ("measured", "given up") for trial in record.trials)
    words = f"{place} of {n_tried} on {record.gpu_name or record.hardware}"
    if found == record.default:
        return words
    if found == record.best and record.gain is not None:
        low, high = record.gain_low, record.gain_high
        between = "" if low is None else f" [{low:.2f}, {high:.2f}]"
        return f"{words}, {record.gain:.2f} times the default{between}"
    # The best one's gain is null where too few turns were timed to state it.
    ratio = None if found == record.best else record.speedup(found)
    return words if ratio is None else f"{words}, {ratio:.2f} times the default in one trial each"
