"""Render ablation.html: what every switch gains on this machine, beside what was claimed.

Names and claims come from untrusted files: the template escapes them, and charts draw them as SVG
text, which is escaped too.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from expertflow.report import ablation_facts as facts
from expertflow.report import format as f
from expertflow.report.ablation_facts import Ladder, bare, interval, quoted
from expertflow.report.headline import METHODS, Tile
from expertflow.report.measured import (
    NO_REASON,
    NOT_MEASURED,
    Measured,
    Missing,
    format_value,
    or_missing,
)
from expertflow.report.sheet import render
from expertflow.studies.records import PLAN, AblationRecord, Bar, ClaimVerdict

N_NAMED = 4
VERDICTS = (
    "as claimed", "more", "less", "no change", "not decided", "measured", "not measurable",
)  # fmt: skip
TONES = {"as claimed": "pass", "more": "pass", "less": "fail", "no change": "fail"}
Line = dict[str, Any]
# The field whose reason explains missing dollars.
NO_PRICE = "usd_per_million_tokens"


class Verdict(NamedTuple):
    level: str
    answer: str
    sentence: str


def render_ablation(record: AblationRecord) -> str:
    """Render the page; raise DataError if a ladder's steps do not multiply to the total."""
    from expertflow.report.charts.waterfall import changes_chart  # loads altair, takes a second

    groups = _groups(record)
    columns, left_out = _columns(groups)
    method = METHODS.get(record.method, record.method)
    return render(
        "ablation.html.j2",
        record=record,
        subject=" \u00b7 ".join((record.expert, record.model, method, f"preset {record.preset}")),
        tiles=tiles(record),
        changes=changes_chart(facts.changes(record)),
        groups=groups,
        columns=columns,
        left_out=left_out,
        what_was_run=_what_was_run(record, method),
        **show_comparison(record),
    )


def show_comparison(record: AblationRecord) -> dict[str, Any]:
    from expertflow.report.charts.waterfall import waterfall_chart

    ladders, no_ladder = facts.ladders(record), ""
    if not record.ladders:
        no_ladder = "No ladder is in the lists that were run (ablation.files)."
    elif not ladders:
        rungs = {name for names in record.ladders for name in names}
        reasons = [f"{bar.label}: {bar.reason}" for bar in record.bars if bar.name in rungs]
        no_ladder = f"No rung was measured. {'; '.join(reasons)}"
    return {
        "verdict": verdict(record),
        "claims": claim_lines(record),
        "counts": ledger_counts(record),
        "waterfalls": [waterfall_chart(ladder) for ladder in ladders],
        "missing_rungs": [step for ladder in ladders for step in ladder.missing],
        "no_ladder": no_ladder,
    }


def verdict(record: AblationRecord) -> Verdict:
    single, ladders = facts.changes(record), facts.telling_ladders(record)
    ladder = ladders[0] if ladders else None
    faster = [bar for bar in single if facts.is_faster(bar)]
    measured = [bar for bar in single if bar.ratio and bar.metric == "tokens_per_s"]
    if ladder is None and not measured:
        reasons = [f"{bar.label}: {bar.reason}" for bar in record.bars if bar.reason]
        why = f"{_listed(reasons)}." if reasons else "No variant was run."
        return Verdict("bad", "Nothing was measured.", why)
    sentences = [*([] if ladder is None else _worth(record, ladder)), *_costs_most(measured)]
    if faster:
        texts = [f"{quoted(b.label)} ({f.factor(b.ratio.value)})" for b in faster[::-1] if b.ratio]
        sentences.append(f"Faster than the plan here: {_listed(texts, ', ')}.")
    same = [quoted(b.label) for b in measured if b.ratio and facts.makes_no_difference(b.ratio)]
    if same:
        sentences.append(f"No measurable difference: {_listed(same, ', ')}.")
    is_bad = ladder is not None and ladder.whole.high < 1
    level = "bad" if is_bad else "mixed" if faster else "good"
    return Verdict(level, _answer(ladder, n_faster=len(faster)), " ".join(sentences))


def _answer(ladder: Ladder | None, *, n_faster: int) -> str:
    if ladder is None:
        if n_faster == 0:
            return "No change is measurably faster."
        return "One change is faster." if n_faster == 1 else f"{n_faster} changes are faster."
    if facts.makes_no_difference(ladder.whole):
        return "Nothing measurable."
    return f"{bare(ladder.whole.value)} times as fast." if ladder.whole.value > 1 else "Slower."


def _worth(record: AblationRecord, ladder: Ladder) -> list[str]:
    where = record.gpu_name or record.machine or record.hardware
    start, end = ladder.start.tokens_per_s, ladder.steps[-1].tokens_per_s
    assert start is not None and end is not None
    said = [
        f"On {where} the plan trains {f.short(end)} useful tokens a second,"
        f" {quoted(ladder.start.label)} {f.short(start)}:"
        f" {f.factor(ladder.whole.value)} ({interval(ladder.whole)})."
    ]
    label, worth = facts.steps_that_count(ladder)[0]
    if worth.low > 1:
        said.append(f"The largest step is {quoted(label)} ({f.factor(worth.value)}).")
    return said


def _costs_most(measured: Sequence[Bar]) -> list[str]:
    worst = min(measured, key=lambda bar: bar.ratio.value if bar.ratio else 1.0, default=None)
    if worst is None or worst.ratio is None or worst.ratio.high >= 1:
        return []
    return [
        f"Of single changes, {quoted(worst.label)} costs most:"
        f" {f.factor(worst.ratio.value)} of the plan\u2019s speed."
    ]


def _listed(texts: Sequence[str], between: str = "; ") -> str:
    more = f" and {len(texts) - N_NAMED} more" if len(texts) > N_NAMED else ""
    return between.join(texts[:N_NAMED]) + more


def ledger_counts(record: AblationRecord) -> str:
    counts = Counter[str](claim.verdict for claim in record.claims)
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])


def tiles(record: AblationRecord) -> tuple[Tile, ...]:
    ladder = next(iter(facts.telling_ladders(record)), None)
    why = "every rung is the plan" if facts.ladders(record) else "no rung of a ladder was measured"
    usd, n_claims = record.plan_usd_per_million_tokens, len(record.claims)
    against: Measured[str] = Missing(why)
    against_note, dearer = "", ""
    speed_note = "the plan, no padding"
    if ladder is not None:
        start, whole = ladder.start, ladder.whole
        against = f.factor(whole.value)
        against_note = f"95{f.NBSP}% interval {interval(whole)}"
        dearer = "" if usd is None else f"first rung: {f.usd_rate(usd * whole.value)}"
        if start.tokens_per_s:
            speed_note = f"{start.label}: {f.short(start.tokens_per_s)}"

    def tell(name: str, value: float | None, show: Callable[[float], str]) -> Measured[str]:
        return format_value(or_missing(value, record.unavailable.get(name, NO_REASON)), show)

    speed = tell("plan_tokens_per_s", record.plan_tokens_per_s, f.short)
    claims = f"{n_claims}" if n_claims else "none"
    claims_note = ledger_counts(record) if n_claims else "no list of claims was asked for"
    return (
        Tile("Useful tokens/s", speed, speed_note),
        Tile("Against the first rung", against, against_note),
        Tile("A million tokens", tell(NO_PRICE, usd, f.usd_rate), dearer),
        Tile("Claims", claims, claims_note),
    )


def in_a_line(record: AblationRecord) -> str:
    faster = [quoted(bar.label) for bar in facts.changes(record) if facts.is_faster(bar)]
    parts = [verdict(record).answer.rstrip(".")]
    if ladders := facts.telling_ladders(record):
        whole, start = ladders[0].whole, quoted(ladders[0].start.label)
        parts = [f"plan {f.factor(whole.value)} ({interval(whole)}) beside {start}"]
    if faster:
        parts.append(f"faster than the plan: {_listed(faster[::-1], ', ')}")
    if record.claims:
        parts.append(f"claims: {ledger_counts(record)}")
    return "; ".join(parts)


def _groups(record: AblationRecord) -> list[tuple[str, list[Line]]]:
    bars = {bar.name: bar for bar in record.bars}
    ladders = [
        (bars[names[0]].of or names[0], [bars[n] for n in names if n in bars and n != PLAN])
        for names in record.ladders
        if names
    ]
    groups = [(f"ladder {name}", lines(rungs, record)) for name, rungs in ladders]
    single = lines(facts.changes(record), record)
    return [*groups, ("one change each", single)] if single else groups


def _columns(groups: list[tuple[str, list[Line]]]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the columns that have a figure, and the reason for each that has none."""
    measured = [line for _, lines in groups for line in lines if not line["reason"]]
    cells = [cell for line in measured for cell in line["cells"]]
    shown = list(dict.fromkeys(name for name, cell in cells if cell))
    missing = [(name, cell) for name, cell in dict(cells).items() if isinstance(cell, Missing)]
    return shown, [(name, cell.reason) for name, cell in missing if name not in shown]


def lines(bars: Sequence[Bar], record: AblationRecord) -> list[Line]:
    """Return table rows of variants; ``reason`` is set exactly where there are no figures."""
    return [_line(bar, record) for bar in bars]


def _line(bar: Bar, record: AblationRecord) -> Line:
    no_price = record.unavailable.get(NO_PRICE, NOT_MEASURED)
    no_memory = NOT_MEASURED
    if record.device == "cpu":
        no_memory = "a CPU has no memory of its own; the host's is not the variant's alone"
    shown: tuple[tuple[str, float | None, Callable[[float], str], str], ...] = (
        ("tokens/s", bar.tokens_per_s, f.short, NOT_MEASURED),
        ("$/M tokens", bar.usd_per_million_tokens, f.usd_rate, no_price),
        ("peak memory", bar.peak_memory_bytes, f.size, no_memory),
        ("padding", bar.padding_fraction, f.percent, NOT_MEASURED),
        ("data wait", bar.data_wait_fraction, f.percent, NOT_MEASURED),
    )
    ratio = bar.ratio
    return {
        "label": facts.label(bar),
        # Notes on other metrics appear beside their claims.
        "note": bar.reason if ratio and bar.metric == "tokens_per_s" else None,
        "outcome": bar.outcome,
        "reason": None if ratio else bar.reason or NOT_MEASURED,
        "ratio": f.factor(ratio.value) if ratio else "",
        "interval": interval(ratio) if ratio else "",
        "spread": f"{bare(ratio.least)} to {bare(ratio.most)}" if ratio else "",
        "cells": [
            (name, format_value(or_missing(value, why), show)) for name, value, show, why in shown
        ],
        "loss": _loss(bar),
        "is_sane": bar.is_sane,
    }


def _loss(bar: Bar) -> str:
    if bar.is_sane is None:
        return "not compared"
    difference = "" if bar.loss_differs is None else f.signed_percent(bar.loss_differs)
    allowed = "" if bar.loss_bound is None else f" (\u00b1{f.percent(bar.loss_bound)})"
    if bar.is_sane:
        return difference or "as the plan\u2019s"
    return f"differs: {difference}{allowed}" if difference else "differs"


def claim_lines(record: AblationRecord) -> list[dict[str, str]]:
    """Return table rows of the claims in file order; ``tone`` names a color."""
    return [
        {
            "claim": claim.claim,
            "by": claim.by,
            "said": claim.said,
            "claimed": _claimed(claim),
            "measured": f.factor(claim.measured.value) if claim.measured else "",
            "interval": interval(claim.measured) if claim.measured else "",
            "verdict": claim.verdict,
            # A claim without figures cannot be wrong.
            "tone": "na" if claim.low is None else TONES.get(claim.verdict, "na"),
            "reason": claim.reason or "",
        }
        for claim in record.claims
    ]


def _claimed(claim: ClaimVerdict) -> str:
    low, high = claim.low, claim.high
    if low is None:
        return "" if high is None else f"at most {f.factor(high)}"
    if high is None:
        return f"at least {f.factor(low)}"
    return f.factor(low) if low == high else f"{f.factor(low)} to {bare(high)}"


def _what_was_run(record: AblationRecord, method: str) -> list[tuple[str, str]]:
    price = record.price_usd_per_hour
    as_of = f", as of {record.price_as_of}" if record.price_as_of else ""
    places = (record.gpu_name, record.machine, record.device, record.hardware)
    return [
        ("hardware", ", ".join(dict.fromkeys(part for part in places if part))),
        ("model", f"{record.model}, {method}"),
        ("rows", f"{f.count(record.sequence_length_tokens)} tokens"),
        ("global batch", f.number_of(record.global_batch_sequences, "sequence")),
        ("repeats", f"{f.number_of(record.n_repeats, 'pair')} a variant, each taking turns with"
         " the plan"),
        ("steps", f"{f.count(record.n_timed_steps)} timed, after {f.count(record.n_warmup_steps)}"
         " to warm up that do not count"),
        ("price", "none" if price is None else f"{f.usd(price)} an hour{as_of}"),
        ("versions", ", ".join(f"{name} {text}" for name, text in record.versions.items())),
    ]  # fmt: skip
