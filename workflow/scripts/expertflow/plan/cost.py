"""Convert seconds of a step into hours and hours into dollars, with a band.

Without measurements on the same card, ``plan/step_time.py`` predicts a step from its FLOPs and
memory traffic, and the band is the error of that model on published runs. Without a known card
there is no estimate, and without a price, no dollars.

A calibration replaces all of that with measured seconds: steps, saves, evaluations, and one-time
work. Its band is the quartiles of the steps, widened by 5 %.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from expertflow.core.errors import ConfigError
from expertflow.core.format import percent
from expertflow.core.settings import name_of
from expertflow.hardware.records import GpuFacts
from expertflow.plan.claims import time_words
from expertflow.plan.draft import PlanDraft
from expertflow.plan.memory import WEIGHT_BYTES, can_hold, loss_chunk_rows
from expertflow.plan.records import (
    Calibration,
    CostPlan,
    PlanSpec,
    StepChange,
    StepSeconds,
    TrainPlan,
)
from expertflow.plan.settings import Training
from expertflow.plan.step_time import (
    StepWork,
    bound_of,
    bound_words,
    card_speed,
    peak_flops_per_s,
    predict_step,
)
from expertflow.plan.switches import breaks_graphs
from expertflow.tokens.records import PackingRecord
from expertflow.train.optimizers import state_bytes

# Error allowed for a calibrated prediction besides the spread of the steps: a target.
CALIBRATED_BAND = 0.05

# Low, middle and high hours; null where unknown.
Band = tuple[float | None, float | None, float | None]


class Price(NamedTuple):
    usd_per_hour: float | None = None
    as_of: str | None = None
    billing_minutes: float | None = None

    def usd(self, hours: float | None) -> float | None:
        if hours is None or self.usd_per_hour is None:
            return None
        return round_up_hours(hours, self.billing_minutes) * self.usd_per_hour

    def band(self, hours: Band, prefix: str = "") -> dict[str, Any]:
        """Return hours and dollars by field: low, middle and high."""
        found: dict[str, Any] = {}
        for end, each in zip(("_low", "", "_high"), hours, strict=True):
            found |= {f"{prefix}hours{end}": each, f"{prefix}usd{end}": self.usd(each)}
        return found


def round_up_hours(hours: float, billing_minutes: float | None) -> float:
    """Round hours up to full billing steps, if there are any."""
    if billing_minutes is None:
        return hours
    # A hair over an integer number of steps is rounding error.
    return math.ceil(hours * 60 / billing_minutes - 1e-9) * billing_minutes / 60


def count_evals(plan: TrainPlan) -> int:
    """Count evaluations: one before the first step, the scheduled ones, one at the end."""
    return 1 + math.ceil(plan.n_steps / plan.eval_steps)


def count_saves(plan: TrainPlan, step_s: float) -> int:
    """Count saves by steps or by time, and the last one; each save restarts the clock."""
    by_time = math.floor(plan.save_every_minutes * 60 / step_s) + 1
    # The end of each block is a save by steps; that of the remainder is the last save.
    n_blocks, remainder = divmod(plan.n_steps, plan.save_steps)
    return n_blocks * math.ceil(plan.save_steps / by_time) + math.ceil(remainder / by_time)


def count_best_saves(plan: TrainPlan) -> int:
    # Those at steps that are saved anyway, and the last, are already in count_saves.
    evals = range(plan.eval_steps, plan.n_steps, plan.eval_steps)
    return sum(s % plan.save_steps != 0 for s in evals) if plan.load_best_model_at_end else 0


def price_of(spec: PlanSpec, gpu: GpuFacts | None, n_cards: int) -> Price:
    """Return the user's price for this card: hourly per card, plus storage once."""
    row = spec.prices.get(gpu.name) if gpu else None
    if row is None:
        return Price()
    rate = row["usd_per_hour"] * n_cards + (row.get("storage_usd_per_hour") or 0.0)
    # A card's own billing step wins over the one for all cards.
    minutes = row.get("billing_minutes") or spec.billing_minutes
    return Price(rate, row["as_of"], minutes)


def price_of_plan(spec: PlanSpec, gpu: GpuFacts | None) -> Price:
    if spec.price_usd_per_hour is None:
        return price_of(spec, gpu, spec.world_size)
    return Price(spec.price_usd_per_hour, spec.price_as_of, spec.billing_minutes)


def plan_cost(
    draft: PlanDraft,
    plan: TrainPlan,
    *,
    calibration: Calibration | None = None,
    ignored: str | None = None,
) -> CostPlan:
    """Predict hours and dollars on ``world_size`` cards of one kind.

    Without a calibration, perfect scaling is assumed. The resulting ``price_usd_per_hour`` covers
    all cards, so wall time times price is the cost of the run. ``ignored`` says why an existing
    calibration is not used.
    """
    hours, parts = _prior_cost(draft, plan, ignored)
    if calibration is not None:
        hours, measured = _calibrated_cost(calibration, plan)
        # The prior's parts of a step, and its changes, stay alongside the measurements.
        parts |= measured
        if (step := parts.get("step")) is not None:
            parts["reason"] += f"; predicted to be {bound_words(step)}"
    mfu, step_hours = None, parts["step_hours"]
    peak = peak_flops_per_s(plan.gpu, plan.precision, use_tf32=plan.use_tf32)
    if peak is not None and step_hours is not None:
        # For the steps alone, without saves, evaluations or startup; over all cards, as the tokens.
        flops = plan.flops_per_token_model * plan.predicted_tokens
        mfu = flops / (step_hours * 3600 * (peak * plan.world_size))
    price = price_of_plan(draft.spec, plan.gpu)
    return CostPlan(
        mfu_fraction=mfu,
        price_usd_per_hour=price.usd_per_hour,
        price_as_of=price.as_of,
        billing_minutes=price.billing_minutes,
        **price.band(hours, "predicted_"),
        **parts,
    )


def step_work(draft: PlanDraft, plan: TrainPlan) -> StepWork:
    train = draft.packing.train
    return StepWork(
        facts=draft.facts,
        lora=plan.lora,
        n_tokens=plan.batch_size * _row_tokens(draft.packing, plan),
        n_micro_batches=plan.gradient_accumulation_steps,
        mean_context_tokens=train.mean_context_tokens,
        supervised_fraction=draft.supervised_fraction,
        checkpoint=plan.gradient_checkpointing,
        compiled=plan.torch_compile,
        is_quantized=plan.method == "qlora",
        n_trained=plan.n_params_trainable,
        value_bytes=int(WEIGHT_BYTES[plan.precision]),
        weight_bytes=int(WEIGHT_BYTES[plan.trained_dtype]),
        state_bytes=state_bytes(plan),
        n_shares=plan.n_shares,
        chunk_rows=loss_chunk_rows(
            draft.facts.vocab_size, draft.memory_total_bytes, trained=draft.trains_head
        ),
    )


def _row_tokens(packing: PackingRecord, plan: TrainPlan) -> float:
    """Return the tokens of a row, including the padding that the trainer does not trim."""
    train, lengths = packing.train, packing.histogram
    mean = train.n_tokens / train.n_sequences
    if packing.packing != "none":
        return mean + train.n_padding_tokens / train.n_sequences
    if plan.group_by_length:
        return mean
    # The probability that all rows of a micro-batch are at most this long is the share of such
    # documents, to the power of the number of rows.
    longest = before = 0.0
    shares = (n / sum(lengths.counts) for n in accumulate(lengths.counts))
    for (start, end), share in zip(pairwise(lengths.edges), shares, strict=True):
        here = share**plan.batch_size
        # The midpoint of a bin: for 100 to 199 tokens, 149.5.
        longest += (here - before) * min((start + end - 1) / 2, packing.sequence_length_tokens)
        before = here
    return max(mean, longest)


def predict_hours(draft: PlanDraft, plan: TrainPlan) -> tuple[Band, StepSeconds | None, str]:
    """Return hours, the step behind them, and their basis, or why there are none."""
    speed = card_speed(plan.gpu, plan.precision, use_tf32=plan.use_tf32)
    if isinstance(speed, str):
        return (None, None, None), None, speed
    plan, n_rows = _fit_step(plan)
    step = predict_step(step_work(draft, plan), speed)
    # By rows, because the last step of an epoch may have fewer.
    hours = step.total_s * plan.n_epochs * plan.n_sequences / n_rows / 3600
    words = f"prior: a step of {step.total_s:.3g} s, from its FLOPs and memory traffic"
    low, high = speed.band
    return (hours * low, hours, hours * high), step, f"{words}; {bound_words(step)}; {speed.basis}"


def _fit_step(plan: TrainPlan) -> tuple[TrainPlan, int]:
    """Return a plan whose steps are no larger than an epoch, and their rows."""
    # 10 rows on 4 cards of 2 x 8 rows each: 1 micro-batch of 3 rows.
    n_cards = plan.world_size
    n_rows = min(plan.n_sequences, plan.batch_size * plan.gradient_accumulation_steps * n_cards)
    batch_size = min(plan.batch_size, math.ceil(n_rows / n_cards))
    n_batches = math.ceil(n_rows / (batch_size * n_cards))
    return replace(plan, batch_size=batch_size, gradient_accumulation_steps=n_batches), n_rows


def _prior_cost(
    draft: PlanDraft, plan: TrainPlan, ignored: str | None
) -> tuple[Band, dict[str, Any]]:
    hours, step, words = predict_hours(draft, plan)
    parts: dict[str, Any] = {"step_hours": hours[1]}
    if step is None:
        words += "; calibrate: true measures its speed"
    else:
        words += "; startup, saves and evaluation not included, as nothing was measured"
        if plan.world_size > 1:
            words += f"; {plan.world_size} cards, assumed to share the work perfectly"
        parts |= {
            "bound": bound_of(step),
            "step": step,
            "changes": tuple(_list_changes(draft, plan)),
        }
    return hours, {"reason": words if ignored is None else f"{words}; {ignored}", **parts}


def _list_changes(draft: PlanDraft, plan: TrainPlan) -> Iterator[StepChange]:
    """Yield the same model's predictions for twice the micro-batch and for each switch."""
    micro = plan.batch_size
    candidates: list[tuple[dict[Any, Any], int | None]] = []
    # Twice the rows in half as many micro-batches: the same global batch.
    if plan.gradient_accumulation_steps % 2 == 0:
        half = plan.gradient_accumulation_steps // 2
        twice = {Training.batch_size: 2 * micro, Training.gradient_accumulation_steps: half}
        candidates.append((twice, plan.next_micro_batch_peak_bytes))
    # Checkpointing takes less memory than the plan without it, which fits.
    again = plan.gradient_checkpointing
    peak = plan.without_checkpointing_peak_bytes if again else plan.predicted_peak_bytes
    candidates.append(({Training.gradient_checkpointing: not again}, peak))
    if not breaks_graphs(draft.spec):
        candidates.append(({Training.torch_compile: not plan.torch_compile}, None))
    for changed, peak in candidates:
        by_name = {name_of(setting): value for setting, value in changed.items()}
        _, step, _ = predict_hours(draft, replace(plan, **by_name))
        if step is not None:
            fits = can_hold(draft.memory_total_bytes, peak)
            name, value = next(iter(by_name.items()))
            yield StepChange(setting=name, value=str(value), step_s=step.total_s, fits=fits)


def _calibrated_cost(measured: Calibration, plan: TrainPlan) -> tuple[Band, dict[str, Any]]:
    n_saves = count_saves(plan, measured.step_s)
    saves = n_saves * measured.save_s / 3600
    evals = count_evals(plan) * measured.eval_s / 3600
    startup = measured.startup_s / 3600
    # Occasional much slower steps affect the mean but no quartile.
    slow_s = max(measured.step_s_high, measured.step_s_mean)
    seconds = (measured.step_s_low, measured.step_s, slow_s)
    low, steps, high = (plan.n_steps * each / 3600 for each in seconds)
    others = saves + evals + startup
    most = others + count_best_saves(plan) * measured.save_s / 3600
    hours = (
        (min(low, steps) + others) * (1 - CALIBRATED_BAND),
        steps + others,
        (max(high, steps) + most) * (1 + CALIBRATED_BAND),
    )
    return hours, {
        "reason": _measured_reason(measured, plan, n_saves),
        "calibrated": True,
        "step_hours": steps,
        "save_hours": saves,
        "eval_hours": evals,
        "startup_hours": startup,
    }


def _measured_reason(measured: Calibration, plan: TrainPlan, n_saves: int) -> str:
    slow = measured.step_s_mean > measured.step_s_high
    some = f"; some took much longer, for a mean of {measured.step_s_mean:.4g} s" if slow else ""
    band = "the lower quartile to that mean" if slow else "the quartiles"
    over = f"{measured.n_timed_steps} steps"
    if measured.n_timings != measured.n_timed_steps:
        # Full epochs if those are short; on a card, the steps between two log lines.
        over = f"the means of {measured.n_timings} intervals, {over} in all"
    best = count_best_saves(plan)
    more = f"; the high end includes up to {best} more saves, of the best so far" if best else ""
    return (
        f"calibrated on {measured.hardware}: {plan.n_steps:,} steps of {measured.step_s:.4g} s"
        f" (quartiles {measured.step_s_low:.4g} to {measured.step_s_high:.4g} s over"
        f" {over}{some}), {n_saves} x {measured.save_s:.3g} s of saving,"
        f" {count_evals(plan)} x {measured.eval_s:.3g} s of evaluation, and"
        f" {measured.startup_s:.3g} s of one-time work; the band is {band} plus"
        f" {percent(CALIBRATED_BAND, 0)}{more}"
    )


def check_budgets(cost: CostPlan, spec: PlanSpec) -> Iterator[tuple[Any, str, str]]:
    """Yield setting, value and outcome of each budget; raise ConfigError unless it is met."""
    hours, usd = cost.predicted_hours, cost.predicted_usd
    for setting, value, high, show in (
        (Training.max_hours, hours, cost.predicted_hours_high, _hours_words),
        (Training.max_usd, usd, cost.predicted_usd_high, _usd_words),
    ):
        key = name_of(setting)
        if (budget := getattr(spec, key)) is None:
            continue
        if value is None or high is None:
            lacks = "no price is configured for this hardware"
            if hours is None:
                lacks = "the speed of this hardware is unknown (calibrate: true measures it)"
            if not spec.may_drop_budgets:
                raise ConfigError(
                    f"training.{key} is set but cannot be checked: {lacks}; provide what is"
                    f" missing, or set {key} to null"
                )
            words = "ignored: the demo runs on the CPU, where no budget can be checked"
        # The middle decides; a high end above the budget is only reported.
        elif value > budget:
            raise ConfigError(
                f"training.{key} is {budget:g} but the plan needs {show(value)}; raise"
                " it, or train fewer tokens"
            )
        else:
            words = f"the prediction is {show(value)}, at most {show(high)}"
            if high > budget:
                words += ": the middle is within the budget, the high end above it"
        yield setting, f"{budget:g}", words


def _hours_words(hours: float) -> str:
    return f"{hours:.4g} hours ({time_words(hours)})"


def _usd_words(usd: float) -> str:
    return f"${usd:.2f}" if usd >= 1 else f"${usd:.3g}"
