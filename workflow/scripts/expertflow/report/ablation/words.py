"""Say in words what an ablation found: the verdict, the tiles, a line for the terminal."""

from collections import Counter
from collections.abc import Sequence

from expertflow.core.records import Record
from expertflow.report import ablation_facts as facts
from expertflow.report import format as f
from expertflow.report.ablation.view import NO_PRICE
from expertflow.report.ablation_facts import quoted
from expertflow.report.view.report import NOT_MEASURED, Cell, Show, Tile
from expertflow.studies.records import AblationRecord, Bar, Estimate

N_NAMED = 4
VERDICTS = (
    "as claimed", "more", "less", "no change", "not decided", "measured", "not measurable",
)  # fmt: skip


class Verdict(Record, frozen=True, kw_only=True):
    """What the default is worth, in a few sentences; ``level`` names a colour."""

    level: str
    answer: str
    sentence: str


def verdict(record: AblationRecord) -> Verdict:
    single, ladders = facts.changes(record), facts.telling_ladders(record)
    faster = [bar for bar in single if facts.is_faster(bar)]
    measured = [bar for bar in single if bar.ratio and bar.metric == "tokens_per_s"]
    if not ladders and not measured:
        return Verdict(
            level="bad", answer="Nothing was measured.", sentence=_why_nothing(record)
        )  # fmt: skip
    sentences = [*_worth(record, ladders), *_helps(measured, ladders), *_faster(faster)]
    same = [b.label for b in measured if b.ratio and facts.makes_no_difference(b.ratio)]
    if same:
        sentences.append(f"No measurable difference: {named(same)}.")
    is_slower = bool(ladders) and ladders[0].whole.high < 1
    return Verdict(
        level="bad" if is_slower else "mixed" if faster else "good",
        answer=_answer(ladders, n_faster=len(faster)),
        sentence=" ".join(sentences),
    )


def _answer(ladders: tuple[facts.Ladder, ...], *, n_faster: int) -> str:
    if not ladders:
        return "One change is faster." if n_faster == 1 else (
            f"{n_faster} changes are faster." if n_faster else "No change is measurably faster."
        )  # fmt: skip
    whole = ladders[0].whole
    if facts.makes_no_difference(whole):
        return "Nothing measurable."
    return f"{facts.bare(whole.value)} times as fast." if whole.value > 1 else "Slower."


def _worth(record: AblationRecord, ladders: tuple[facts.Ladder, ...]) -> list[str]:
    if not ladders:
        return []
    ladder, where = ladders[0], record.gpu_name or record.machine or record.hardware
    start, end = ladder.start.tokens_per_s, ladder.steps[-1].tokens_per_s
    assert start is not None and end is not None
    return [
        f"On {where} the plan trains {f.short(end)} useful tokens a second,"
        f" {quoted(ladder.start.label)} {f.short(start)}:"
        f" {f.factor(ladder.whole.value)} ({facts.interval(ladder.whole)})."
    ]


def _helps(measured: Sequence[Bar], ladders: tuple[facts.Ladder, ...]) -> list[str]:
    said = []
    if ladders and (steps := facts.steps_that_count(ladders[0])) and steps[0][1].low > 1:
        label, worth = steps[0]
        said.append(f"The largest step is {quoted(label)} ({f.factor(worth.value)}).")
    worst = min(measured, key=lambda bar: bar.ratio.value if bar.ratio else 1.0, default=None)
    if worst and worst.ratio and worst.ratio.high < 1:
        said.append(
            f"Of single changes, {quoted(worst.label)} costs most:"
            f" {f.factor(worst.ratio.value)} of the plan\u2019s speed."
        )
    return said


def _faster(faster: list[Bar]) -> list[str]:
    if not faster:
        return []
    texts = [
        f"{quoted(bar.label)} ({f.factor(bar.ratio.value)})"
        for bar in reversed(faster)
        if bar.ratio is not None
    ]
    return [f"Faster than the plan here: {', '.join(texts[:N_NAMED])}{_more(texts)}."]


def _why_nothing(record: AblationRecord) -> str:
    reasons = [f"{bar.label}: {bar.reason}" for bar in record.bars if bar.reason]
    return f"{'; '.join(reasons[:N_NAMED])}{_more(reasons)}." if reasons else "No variant was run."


def named(labels: Sequence[str]) -> str:
    return ", ".join(quoted(label) for label in labels[:N_NAMED]) + _more(labels)


def _more(items: Sequence[str]) -> str:
    return f" and {len(items) - N_NAMED} more" if len(items) > N_NAMED else ""


def ledger_counts(record: AblationRecord) -> str:
    """Count the claims by verdict.

    Unnamed verdicts have none; an empty ledger gives an empty text.
    """
    counts = Counter[str](claim.verdict for claim in record.claims)
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])


def tiles(record: AblationRecord) -> tuple[Tile, ...]:
    ladder = next(iter(facts.telling_ladders(record)), None)
    why = "every rung is the plan" if facts.ladders(record) else "no rung of a ladder was measured"
    none = Cell(text=NOT_MEASURED, reason=why)
    speed, usd = record.plan_tokens_per_s, record.plan_usd_per_million_tokens
    start = ladder.start if ladder else None
    whole = ladder.whole if ladder else None
    return (
        Tile(
            label="Useful tokens/s",
            value=_cell(record, "plan_tokens_per_s", speed, f.short),
            note=f"{start.label}: {f.short(start.tokens_per_s)}"
            if start and start.tokens_per_s
            else "the plan, no padding",
        ),
        Tile(
            label="Against the first rung",
            value=Cell(text=f.factor(whole.value)) if whole else none,
            note=f"95{f.NBSP}% interval {facts.interval(whole)}" if whole else "",
        ),
        Tile(
            label="A million tokens",
            value=_cell(record, NO_PRICE, usd, f.usd_rate),
            note=_dearer(usd, whole),
        ),
        Tile(
            label="Claims",
            value=Cell(text=f"{len(record.claims)}")
            if record.claims
            else Cell(text="none", reason="no list of claims was asked for"),
            note=ledger_counts(record),
        ),
    )


def _dearer(usd: float | None, whole: Estimate | None) -> str:
    return f"first rung: {f.usd_rate(usd * whole.value)}" if usd is not None and whole else ""


def _cell(record: AblationRecord, name: str, value: float | None, show: Show) -> Cell:
    if value is not None:
        return Cell(text=show(value))
    return Cell(text=NOT_MEASURED, reason=record.unavailable.get(name, "no reason was recorded"))


def in_a_line(record: AblationRecord) -> str:
    found = verdict(record)
    ladders = facts.telling_ladders(record)
    faster = [bar for bar in facts.changes(record) if facts.is_faster(bar)]
    parts = [found.answer.rstrip(".")]
    if ladders:
        whole, start = ladders[0].whole, quoted(ladders[0].start.label)
        parts = [f"plan {f.factor(whole.value)} ({facts.interval(whole)}) beside {start}"]
    if faster:
        parts.append(f"faster than the plan: {named([bar.label for bar in reversed(faster)])}")
    if record.claims:
        parts.append(f"claims: {ledger_counts(record)}")
    return "; ".join(parts)
