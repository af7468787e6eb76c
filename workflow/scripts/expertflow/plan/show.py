"""Format a plan as text: settings with reasons, memory, cost, other hardware, claims."""

import itertools
import textwrap
from collections.abc import Callable, Iterator

from msgspec.structs import asdict

from expertflow.core.format import gib, percent
from expertflow.core.settings import name_of
from expertflow.plan.claims import usd_words
from expertflow.plan.records import ClaimCheck, CostPlan, HardwareOption, Reason, TrainPlan
from expertflow.plan.settings import LoraSpec, Training
from expertflow.plan.step_time import bound_words

WIDTH = 100


def plan_text(plan: TrainPlan) -> str:
    sections = {
        "plan": _head(plan),
        "settings": _settings(plan.reasons),
        "settings used as given": _taken(plan),
        "memory": _memory(plan),
        "cost": _cost(plan.cost),
        "a step": _step(plan.cost),
        "the same work on other hardware": options_table(plan).splitlines(),
        "claims": _claims(plan.claims),
    }
    texts = {title: textwrap.indent("\n".join(lines), "  ") for title, lines in sections.items()}
    return "\n\n".join(f"{title}\n{text}" for title, text in texts.items() if text)


def _head(plan: TrainPlan) -> Iterator[str]:
    cards = f"{plan.world_size} x " if plan.gpu is not None else ""
    yield f"{plan.expert} on {cards}{plan.hardware}: {plan.method}, {plan.precision}"
    yield (
        f"{plan.n_steps:,} steps of {min(plan.global_batch_sequences, plan.n_sequences)} rows of"
        f" {plan.sequence_length_tokens} tokens, {plan.n_epochs:.2f} epochs,"
        f" {plan.predicted_tokens:,} tokens"
    )
    yield (
        f"{plan.n_params_trainable:,} of {plan.n_params_total:,} parameters are trained;"
        f" {plan.flops_per_token_model / 1e9:.3g} GFLOP per token"
    )


def _fill(words: str, first: str, indent: int, width: int = WIDTH) -> str:
    return textwrap.fill(
        words, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _settings(reasons: tuple[Reason, ...]) -> Iterator[str]:
    wide = max((len(reason.setting) for reason in reasons), default=0) + 2
    for reason in reasons:
        words = f"{reason.value}: {reason.because}"
        if reason.source_value is not None and reason.source_value != reason.value:
            words += f" (the setup it replaces: {reason.source_value})"
        yield _fill(words, reason.setting.ljust(wide), wide)


def _taken(plan: TrainPlan) -> Iterator[str]:
    # The reason for the precision explains both.
    precision = {name_of(Training.bf16), name_of(Training.fp16)}
    explained = {reason.setting for reason in plan.reasons} | precision
    found: dict[str, list[str]] = {}
    for name, origin in plan.origins.items():
        if name not in explained and origin != "computed":
            value = getattr(plan, name)
            text = "null" if value is None else str(value)
            if isinstance(value, LoraSpec):
                text = f"r {value.r} alpha {value.alpha} on {' '.join(value.targets)}"
                text += "".join(f", {name} in full" for name in value.modules_to_save)
                text += f" from {value.init_from}" if value.init_from else ""
            found.setdefault(origin, []).append(f"{name} {text}")
    for place, named in found.items():
        yield _fill(", ".join(named), f"{place}: ", 4)


def _memory(plan: TrainPlan) -> Iterator[str]:
    if plan.predicted_peak_bytes is None:
        yield f"peak unknown: {plan.predicted_peak_reason}"
        return
    total = plan.gpu.memory_total_bytes if plan.gpu else None
    of = "" if total is None else f" of {gib(total)}"
    peak = f"peak {gib(plan.predicted_peak_bytes, 2)}{of}: {plan.predicted_peak_reason}"
    yield from textwrap.wrap(peak, WIDTH - 2)
    if (parts := plan.memory) is not None:
        yield (
            f"model {gib(parts.model_bytes, 2)}, optimizer {gib(parts.optimizer_bytes, 2)},"
            f" step {gib(parts.step_bytes, 2)}, reserve {gib(parts.reserve_bytes, 2)}"
        )
    if plan.next_micro_batch_peak_bytes is not None:
        yield f"twice the micro-batch would take {gib(plan.next_micro_batch_peak_bytes, 2)}"


def _cost(cost: CostPlan) -> Iterator[str]:
    middle, low, high = cost.predicted_hours, cost.predicted_hours_low, cost.predicted_hours_high
    kind = "calibrated" if cost.calibrated else "prior"
    hours = f"{_band(short_time, middle, low, high)}, {kind}"
    yield f"hours    {'unknown' if middle is None else hours}"
    if (price := cost.price_usd_per_hour) is None:
        yield "dollars  unknown: no price is configured for this hardware"
    else:
        usd = _band(usd_words, cost.predicted_usd, cost.predicted_usd_low, cost.predicted_usd_high)
        rate = f"at {usd_words(price)} an hour, as of {cost.price_as_of or 'an unknown date'}"
        yield f"dollars  {'unknown,' if cost.predicted_usd is None else usd} {rate}"
    if cost.mfu_fraction is not None:
        yield f"MFU      {percent(cost.mfu_fraction)} in the middle prediction"
    parts = {
        "steps": cost.step_hours,
        "saves": cost.save_hours,
        "evaluations": cost.eval_hours,
        "one-time work": cost.startup_hours,
    }
    known = [f"{name} {short_time(hours)}" for name, hours in parts.items() if hours is not None]
    if known:
        yield f"parts    {', '.join(known)}"
    yield from textwrap.wrap(cost.reason, WIDTH - 2)


def _step(cost: CostPlan) -> Iterator[str]:
    """Yield the predicted parts of a step, and its speed with other settings."""
    if (step := cost.step) is None:
        return
    parts = {name.removesuffix("_s"): value for name, value in asdict(step).items()}
    total = parts.pop("total")
    shares = ", ".join(f"{name} {percent(part / total, 0)}" for name, part in parts.items() if part)
    yield f"{total:.3g} s: {shares}"
    yield bound_words(step)
    for change in cost.changes:
        known = {True: "", False: ", but is not predicted to fit", None: ""}[change.fits]
        faster = total / change.step_s - 1
        yield f"{change.setting} {change.value}: {faster:+.0%} tokens a second{known}"


def _claims(claims: tuple[ClaimCheck, ...]) -> Iterator[str]:
    for text, checks in itertools.groupby(claims, key=lambda check: check.text):
        yield f'"{text}"'
        yield from map(claim_line, checks)


def claim_line(check: ClaimCheck) -> str:
    mark = "holds" if check.holds else "wrong"
    return _fill(check.finding, f"  {mark} ", 8, WIDTH - 2)


def options_table(plan: TrainPlan) -> str:
    """Return the options as a table, the quickest and the cheapest marked; empty without any."""
    if not plan.options:
        return ""
    head = ("hardware", "fits", "rows", "time", "$/h", "dollars", "remark")
    rows = [head, *(_row(option, plan.options) for option in plan.options)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    sides = ("<", "<", ">", ">", ">", ">", "<")
    cells = [list(zip(row, sides, [*widths, 0], strict=True)) for row in rows]
    return "\n".join("  ".join(f"{c:{side}{w}}" for c, side, w in row).rstrip() for row in cells)


def _row(option: HardwareOption, options: tuple[HardwareOption, ...]) -> tuple[str, ...]:
    marks = []
    for key, word in (("hours", "quickest"), ("usd", "cheapest")):
        known = [o for o in options if o.fits is not False and getattr(o, key) is not None]
        # A single option gets no mark. In a tie, fewer cards win: scaling is never perfect.
        best = min(known, key=lambda o: (round(getattr(o, key), 9), o.n_gpus), default=None)
        if len(known) > 1 and option is best:
            marks.append(word)
    rate = "-" if option.usd_per_hour is None else f"{option.usd_per_hour:.2f}"
    return (
        f"{option.n_gpus} x {option.name}",
        {True: "yes", False: "no", None: "unknown"}[option.fits],
        "-" if option.micro_batch_size is None else str(option.micro_batch_size),
        _band(short_time, option.hours, option.hours_low, option.hours_high),
        rate,
        _band(_short_usd, option.usd, option.usd_low, option.usd_high),
        "; ".join(filter(None, (*marks, option.remark))),
    )


def _short_usd(usd: float) -> str:
    return f"{usd:.2f}" if usd >= 0.1 else f"{usd:.2g}"


def _band(
    show: Callable[[float], str], middle: float | None, low: float | None, high: float | None
) -> str:
    if middle is None:
        return "-"
    band = "" if low is None or high is None else f" ({show(low)} to {show(high)})"
    return f"{show(middle)}{band}"


def short_time(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.2f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"
