"""Check the claimed figures of a run against each other and against a plan.

A progress bar's ``46:47`` is minutes and seconds; hours follow from steps and their rate, steps
from documents, dollars from hours, a total from its parts, a gain from hours before and after.
"""

import math
import re
from collections.abc import Iterator

from expertflow.core.errors import ConfigError
from expertflow.core.format import percent
from expertflow.plan.records import Claim, ClaimCheck, TrainPlan
from expertflow.plan.step_time import peak_flops_per_s

# Figures in logs are rounded: within a tenth they agree. A judgment.
TOLERANCE = 0.1


def check_claims(
    claims: tuple[Claim, ...], plan: TrainPlan | None = None
) -> tuple[ClaimCheck, ...]:
    """Check each claim with two comparable numbers; raise ConfigError for an invalid duration."""
    found = []
    for claim in claims:
        hours, stated = claim.hours, "" if claim.hours is None else f"{claim.hours:g} hours"
        if hours is None and claim.duration is not None:
            hours, stated = parse_duration(claim.duration), claim.duration
        outcomes = [
            *_check_steps(claim, hours, stated),
            *([] if hours is None else _check_hours(claim, hours, stated)),
            *_check_gain(claim, hours, stated),
            *_check_speedup(claim, hours),
            *_check_warmup(claim),
            *([] if plan is None else _check_peak(claim, hours, plan)),
        ]
        found += [ClaimCheck(text=claim.text, holds=ok, finding=words) for ok, words in outcomes]
    return tuple(found)


def parse_duration(text: str) -> float:
    """Return the hours of a progress-bar duration; raise ConfigError unless 46:47 or 1:46:47.

    >>> parse_duration("1:30:00")
    1.5
    """
    if not re.fullmatch(r"(\d+:)?[0-5]?\d:[0-5]\d", text) or not re.search("[1-9]", text):
        raise ConfigError(
            f"duration {text!r} is neither minutes:seconds nor hours:minutes:seconds above 0, both"
            " below 60; write it as 46:47 or 1:46:47"
        )
    seconds = 0
    # 46:47 -> 46 x 60 + 47
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds / 3600


Outcomes = Iterator[tuple[bool, str]]


def _check_steps(claim: Claim, hours: float | None, stated: str) -> Outcomes:
    """Check a duration, rates, steps and documents against each other."""
    n_steps, rate, tokens = claim.n_steps, claim.steps_per_s, claim.tokens_per_step
    if claim.duration is not None and claim.hours is not None:
        # Reading minutes as hours is the most common way to be wrong by a factor of sixty.
        shown = parse_duration(claim.duration)
        form = "minutes:seconds" if claim.duration.count(":") == 1 else "hours:minutes:seconds"
        text = f"{claim.duration} on a progress bar is {form}, {time_words(shown)}"
        yield _outcome(text, shown, claim.hours, stated)
    if n_steps is not None and rate is not None:
        computed = n_steps / rate / 3600
        text = f"{n_steps:,} steps at {rate:g} a second are {time_words(computed)}"
        usd, words = None, [] if hours is None else [stated]
        if claim.usd_per_hour is not None:
            usd = computed * claim.usd_per_hour
            text += f", about {usd_words(usd)} at {usd_words(claim.usd_per_hour)} an hour"
            words += [] if claim.usd is None else [usd_words(claim.usd)]
        if hours is not None:
            yield _outcome(text, computed, hours, " and ".join(words))
        elif usd is not None and claim.usd is not None:
            yield _outcome(text, usd, claim.usd, " and ".join(words))
        else:
            yield True, text
    if rate is not None and tokens is None:
        text = f"{rate:g} steps a second mean nothing without tokens per step"
        yield False, f"{text}; state the tokens of a step"
    elif rate is not None and tokens is not None:
        # A rate of steps is comparable only once converted to tokens.
        text = f"{rate:g} steps a second of {tokens:,.0f} tokens"
        yield True, f"{text} are {rate * tokens:,.0f} tokens a second"
    if claim.n_documents is not None and claim.batch_size is not None:
        epochs = claim.n_epochs or 1.0
        steps = claim.n_documents * epochs / claim.batch_size
        text = f"{claim.n_documents:,} documents x {epochs:g} / {claim.batch_size} a step"
        text += f" are {steps:,.0f} steps"
        yield (True, text) if n_steps is None else _outcome(text, steps, n_steps, f"{n_steps:,}")


def _check_hours(claim: Claim, hours: float, stated: str) -> Outcomes:
    if claim.usd_per_hour is not None and claim.usd is not None:
        usd = hours * claim.usd_per_hour
        text = f"{stated} at {usd_words(claim.usd_per_hour)} are {usd_words(usd)}"
        yield _outcome(text, usd, claim.usd, usd_words(claim.usd))
    if claim.parts_hours:
        total = sum(claim.parts_hours)
        listed = " + ".join(f"{part:g}" for part in claim.parts_hours)
        text = f"the parts listed ({listed}) add up to {total:g} hours"
        yield _outcome(text, total, hours, stated.removesuffix(" hours"))
    if claim.n_saves is None or claim.minutes_per_save is None:
        return
    spent = claim.n_saves * claim.minutes_per_save / 60
    text = f"{claim.n_saves} saves of {claim.minutes_per_save:g} min are {time_words(spent)},"
    text += f" {percent(spent / hours)} of {stated}"
    holds = True
    if claim.n_saves_after is not None and claim.gain_percent is not None:
        gain = 100 * spent * (1 - claim.n_saves_after / claim.n_saves) / hours
        text += f"; with {claim.n_saves_after} of them the gain is {gain:.1f} %"
        holds = gain >= claim.gain_percent * (1 - TOLERANCE)
    yield holds, text if holds else f"{text}, not {claim.gain_percent:g} % or more"


def _check_gain(claim: Claim, hours: float | None, stated: str) -> Outcomes:
    """Check a claimed gain against hours before and after; a range is not one figure."""
    before, low = claim.hours_before, claim.gain_percent
    if before is None or hours is None or low is None:
        return
    high = low if claim.gain_percent_max is None else claim.gain_percent_max
    gain = 100 * (1 - hours / before)
    words = f"{low:g} %" if high == low else f"{low:g}-{high:g} %"
    text = f"{before:g} hours down to {stated} are {gain:.0f} %"
    # A wide range thus never holds: its ends cannot both agree with one figure.
    holds = all(abs(gain - bound) <= TOLERANCE * max(abs(gain), bound) for bound in (low, high))
    yield holds, text if holds else f"{text}, not {words}"


def _check_speedup(claim: Claim, hours: float | None) -> Outcomes:
    """Check a total against its factors, and against hours or speeds before and after."""
    total, tf32, factors = claim.speedup, claim.tf32_speedup, claim.speedups
    if tf32 is not None and claim.precision in (None, "fp32"):
        # An unstated precision is taken as fp32, where TF32 applies.
        factors = (*factors, tf32)
    elif tf32 is not None:
        yield False, f"TF32 does nothing for {claim.precision} products: {tf32:g}x is impossible"
    if total is None:
        return
    claimed = f"{total:g}x"
    if factors:
        listed = " x ".join(f"{factor:g}" for factor in factors)
        product = math.prod(factors)
        yield _outcome(f"the factors ({listed}) make {product:g}x", product, total, claimed)
    if claim.hours_before is not None and hours is not None:
        ratio = claim.hours_before / hours
        text = f"{claim.hours_before:g} hours down to {hours:g} are {ratio:.2g}x"
        yield _outcome(text, ratio, total, claimed)
    if claim.steps_per_s_before is not None and claim.steps_per_s is not None:
        ratio = claim.steps_per_s / claim.steps_per_s_before
        text = f"{claim.steps_per_s_before:g} steps a second up to {claim.steps_per_s:g}"
        yield _outcome(f"{text} are {ratio:.2g}x", ratio, total, claimed)


def _check_warmup(claim: Claim) -> Outcomes:
    if claim.n_warmup_steps is None or claim.n_steps is None or claim.warmup_ratio is None:
        return
    minimum = claim.warmup_steps_min or 0
    given = max(minimum, int(claim.warmup_ratio * claim.n_steps))
    text = f"max({minimum}, int({claim.warmup_ratio:g} x {claim.n_steps})) gives {given} steps"
    holds = given == claim.n_warmup_steps
    yield holds, text if holds else f"{text}, not {claim.n_warmup_steps}"


def _check_peak(claim: Claim, hours: float | None, plan: TrainPlan) -> Outcomes:
    steps_per_s = claim.steps_per_s
    if steps_per_s is None and claim.n_steps is not None and hours is not None:
        steps_per_s = claim.n_steps / (hours * 3600)
    if steps_per_s is None or claim.tokens_per_step is None or claim.hardware != plan.hardware:
        return
    peak = peak_flops_per_s(plan.gpu, plan.precision, use_tf32=plan.use_tf32)
    if peak is not None:
        per_s = steps_per_s * claim.tokens_per_step
        flops_per_s = per_s * plan.flops_per_token_model
        text = f"{per_s:,.0f} tokens a second need {flops_per_s / 1e12:.1f} TFLOP/s with this model"
        text += f" and data, {percent(flops_per_s / peak, 0)} of {plan.hardware}'s peak"
        yield (True, text) if flops_per_s <= peak else (False, f"{text}: impossible")


def _outcome(text: str, computed: float, claimed: float, words: str) -> tuple[bool, str]:
    # Relative to the larger one, so that it does not matter which of the two was claimed.
    holds = abs(computed - claimed) <= TOLERANCE * max(abs(claimed), abs(computed))
    return holds, text if holds else f"{text}, not {words}"


def time_words(hours: float) -> str:
    """Format hours in a fitting unit: ``47 minutes``, ``1.9 hours``."""
    if hours >= 2:
        return f"{hours:.1f} hours" if hours < 10 else f"{hours:,.0f} hours"
    minutes = hours * 60
    return f"{minutes:.0f} minutes" if minutes >= 2 else f"{minutes * 60:.3g} seconds"


def usd_words(usd: float) -> str:
    if usd < 0.01:
        return f"${usd:.2g}"
    return f"${usd:.2f}" if usd < 10 else f"${usd:,.0f}"
