"""Lay an ablation out for tables: a line a variant, and a line a claim."""

from collections.abc import Callable

from expertflow.core.records import Record
from expertflow.report import format as f
from expertflow.report.ablation_facts import bare, interval, label
from expertflow.report.view.report import NOT_MEASURED, Cell
from expertflow.studies.records import AblationRecord, Bar, ClaimVerdict

# Where a record says why it has no dollars.
NO_PRICE = "usd_per_million_tokens"
TONES = {"as claimed": "pass", "more": "pass", "less": "fail", "no change": "fail"}


class Line(Record, frozen=True, kw_only=True):
    """A line of the table of variants. ``reason`` is set exactly where there are no figures.

    ``note`` qualifies figures.
    """

    label: str
    note: str | None
    outcome: str
    reason: str | None
    ratio: str
    interval: str
    spread: str
    cells: tuple[tuple[str, Cell], ...]
    loss: str
    is_sane: bool | None


class ClaimLine(Record, frozen=True, kw_only=True):
    """A line of the ledger. ``tone`` names a colour."""

    claim: str
    by: str
    said: str
    claimed: str
    measured: str
    interval: str
    verdict: str
    tone: str
    reason: str


def lines(bars: tuple[Bar, ...], record: AblationRecord) -> tuple[Line, ...]:
    return tuple(_line(bar, record) for bar in bars)


def _line(bar: Bar, record: AblationRecord) -> Line:
    no_price = record.unavailable.get(NO_PRICE, NOT_MEASURED)
    no_memory = "a CPU has no memory of its own; the host's is not the variant's alone"
    shown: tuple[tuple[str, float | None, Callable[[float], str], str], ...] = (
        ("tokens/s", bar.tokens_per_s, f.short, NOT_MEASURED),
        ("$/M tokens", bar.usd_per_million_tokens, f.usd_rate, no_price),
        ("peak memory", bar.peak_memory_bytes, f.size,
         no_memory if record.device == "cpu" else NOT_MEASURED),
        ("padding", bar.padding_fraction, f.percent, NOT_MEASURED),
        ("data wait", bar.data_wait_fraction, f.percent, NOT_MEASURED),
    )  # fmt: skip
    return Line(
        label=label(bar),
        # The arithmetic of other metrics stands beside their claims.
        note=bar.reason if bar.ratio and bar.metric == "tokens_per_s" else None,
        outcome=bar.outcome,
        reason=None if bar.ratio else bar.reason or NOT_MEASURED,
        ratio=f.factor(bar.ratio.value) if bar.ratio else "",
        interval=interval(bar.ratio) if bar.ratio else "",
        spread=f"{bare(bar.ratio.least)} to {bare(bar.ratio.most)}" if bar.ratio else "",
        cells=tuple(
            (name, Cell(text="\u2013", reason=why) if value is None else Cell(text=show(value)))
            for name, value, show, why in shown
        ),
        loss=_loss(bar),
        is_sane=bar.is_sane,
    )


def _loss(bar: Bar) -> str:
    if bar.is_sane is None:
        return "not compared"
    difference = "" if bar.loss_differs is None else f.signed_percent(bar.loss_differs)
    allowed = "" if bar.loss_bound is None else f" (\u00b1{f.percent(bar.loss_bound)})"
    if bar.is_sane:
        return difference or "as the plan\u2019s"
    return f"differs: {difference}{allowed}" if difference else "differs"


def claim_lines(record: AblationRecord) -> tuple[ClaimLine, ...]:
    return tuple(_claim(claim) for claim in record.claims)


def _claim(claim: ClaimVerdict) -> ClaimLine:
    measured = claim.measured
    return ClaimLine(
        claim=claim.claim,
        by=claim.by,
        said=claim.said,
        claimed=_claimed(claim.low, claim.high),
        measured=f.factor(measured.value) if measured else "",
        interval=interval(measured) if measured else "",
        verdict=claim.verdict,
        # Where nothing was said in figures, nothing was wrong.
        tone="na" if claim.low is None else TONES.get(claim.verdict, "na"),
        reason=claim.reason or "",
    )


def _claimed(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if low is None or high is None:
        known = low if high is None else high
        assert known is not None
        return f"{'at least' if high is None else 'at most'} {f.factor(known)}"
    return f.factor(low) if low == high else f"{f.factor(low)} to {bare(high)}"
