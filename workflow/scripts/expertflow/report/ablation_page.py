"""Render ablation.html: what each switch gains on this machine, next to what was claimed.

Names and claims come from untrusted files: the template escapes them, and charts draw them as SVG
text, which is escaped too.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from expertflow.report import ablation_facts as facts
from expertflow.report import format as f
from expertflow.report.ablation_facts import Ladder, bare_factor, format_interval, quote
from expertflow.report.headline import METHODS, Tile
from expertflow.report.measured import NO_REASON, NOT_MEASURED, Missing, convert_value, or_missing
from expertflow.report.sheet import render
from expertflow.studies.records import AblationRecord, Bar

N_NAMED = 4
VERDICTS = (
    "as claimed", "more", "less", "no change", "not decided", "measured", "not measurable",
)  # fmt: skip
# The field whose reason explains missing dollars.
NO_PRICE = "usd_per_million_tokens"


class AblationAnswer(NamedTuple):
    level: str
    answer: str
    sentence: str


class VariantColumn(NamedTuple):
    """A figure of each variant; ``why`` is the reason if there is none."""

    name: str
    field: str
    show: str
    why: str = NOT_MEASURED


def render_ablation(record: AblationRecord) -> str:
    from expertflow.report.charts.waterfall import changes_chart  # loads altair, takes a second

    groups, columns = _groups(record), _columns(record)
    measured = [bar for _, bars in groups for bar in bars if bar.ratio]
    shown = [x for x in columns if any(getattr(bar, x.field) is not None for bar in measured)]
    method = METHODS.get(record.method, record.method)
    return render(
        "ablation.html.j2",
        record=record,
        method=method,
        subject=" \u00b7 ".join((record.expert, record.model, method, f"preset {record.preset}")),
        tiles=make_ablation_tiles(record),
        changes=changes_chart(facts.single_changes(record)),
        groups=groups,
        columns=shown,
        left_out=[column for column in columns if measured and column not in shown],
        label_of=facts.label_bar,
        **show_comparison(record),
    )


def show_comparison(record: AblationRecord) -> dict[str, object]:
    from expertflow.report.charts.waterfall import waterfall_chart

    ladders, no_ladder = facts.build_ladders(record), ""
    if not record.ladders:
        no_ladder = "The lists that were run (ablation.files) contain no ladder."
    elif not ladders:
        # There is a ladder without figures: each rung has its reason.
        rungs = {name for names in record.ladders for name in names}
        reasons = [f"{bar.label}: {bar.reason}" for bar in record.bars if bar.name in rungs]
        no_ladder = f"No rung was measured. {'; '.join(reasons)}"
    return {
        "verdict": judge_ablation(record),
        "claims": record.claims,
        "counts": count_verdicts(record),
        "waterfalls": [waterfall_chart(ladder) for ladder in ladders],
        "missing_rungs": [s for ladder in ladders for s in ladder.steps if s.tokens_per_s is None],
        "no_ladder": no_ladder,
    }


def judge_ablation(record: AblationRecord) -> AblationAnswer:
    single, ladder = facts.single_changes(record), facts.find_telling_ladder(record)
    faster = [(bar, bar.ratio) for bar in single if facts.is_faster(bar) and bar.ratio]
    measured = [(bar, bar.ratio) for bar in single if bar.ratio and bar.metric == "tokens_per_s"]
    if ladder is None and not measured:
        reasons = [f"{bar.label}: {bar.reason}" for bar in record.bars if bar.reason]
        why = f"{_listed(reasons)}." if reasons else "No variant was run."
        return AblationAnswer("bad", "No training speed was measured.", why)
    sentences = [] if ladder is None else _worth(record, ladder)
    worst, ratio = min(measured, key=lambda item: item[1].value, default=(None, None))
    # Only if the entire interval is slower than the plan.
    if worst and ratio and ratio.high < 1:
        sentences.append(
            f"Of the single changes, {quote(worst.label)} costs the most:"
            f" {f.factor(ratio.value)} of the plan\u2019s speed."
        )
    if faster:
        # Fastest first; single_changes begins with the slowest.
        texts = [f"{quote(bar.label)} ({f.factor(ratio.value)})" for bar, ratio in faster[::-1]]
        sentences.append(f"Faster than the plan here: {_listed(texts, ', ')}.")
    same = [quote(bar.label) for bar, ratio in measured if facts.makes_no_difference(ratio)]
    if same:
        sentences.append(f"No measurable difference: {_listed(same, ', ')}.")
    is_bad = ladder is not None and ladder.whole.high < 1
    level = "bad" if is_bad else "mixed" if faster else "good"
    return AblationAnswer(level, _answer(ladder, n_faster=len(faster)), " ".join(sentences))


def _answer(ladder: Ladder | None, *, n_faster: int) -> str:
    if ladder is None:
        if n_faster == 0:
            return "No change is measurably faster."
        return "One change is faster." if n_faster == 1 else f"{n_faster} changes are faster."
    if facts.makes_no_difference(ladder.whole):
        return "Nothing measurable."
    return (
        f"{bare_factor(ladder.whole.value)} times as fast." if ladder.whole.value > 1 else "Slower."
    )


def _worth(record: AblationRecord, ladder: Ladder) -> list[str]:
    where = record.gpu_name or record.machine or record.hardware
    start, end = ladder.start.tokens_per_s or 0.0, ladder.steps[-1].tokens_per_s or 0.0
    sentences = [
        f"On {where}, the plan trains {f.short(end)} useful tokens per second,"
        f" {quote(ladder.start.label)} {f.short(start)}:"
        f" {f.factor(ladder.whole.value)} ({format_interval(ladder.whole)})."
    ]
    # There is one, because a telling ladder has a step that counts.
    label, worth = facts.steps_that_count(ladder)[0]
    if worth.low > 1:
        sentences.append(f"The largest step is {quote(label)} ({f.factor(worth.value)}).")
    return sentences


def _listed(texts: Sequence[str], between: str = "; ") -> str:
    more = f" and {len(texts) - N_NAMED} more" if len(texts) > N_NAMED else ""
    return between.join(texts[:N_NAMED]) + more


def count_verdicts(record: AblationRecord) -> str:
    counts = Counter[str](claim.verdict for claim in record.claims)
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])


def make_ablation_tiles(record: AblationRecord) -> tuple[Tile, ...]:
    ladder = facts.find_telling_ladder(record)
    unavailable, usd = record.unavailable, record.plan_usd_per_million_tokens
    no_speed = unavailable.get("plan_tokens_per_s", NO_REASON)
    speed = convert_value(or_missing(record.plan_tokens_per_s, no_speed), f.short)
    price = convert_value(or_missing(usd, unavailable.get(NO_PRICE, no_speed)), f.usd_rate)
    why = (
        "every rung is the plan"
        if facts.build_ladders(record)
        else "no rung of a ladder was measured"
    )
    against, note, dearer = Tile("Against the first rung", Missing(why), ""), "", ""
    if ladder is not None:
        start, whole = ladder.start, ladder.whole
        interval = f"95{f.NBSP}% interval {format_interval(whole)}"
        against = Tile("Against the first rung", f.factor(whole.value), interval)
        dearer = "" if usd is None else f"first rung: {f.usd_rate(usd * whole.value)}"
        note = f"{start.label}: {f.short(start.tokens_per_s)}" if start.tokens_per_s else ""
    n_claims, counts = len(record.claims), count_verdicts(record)
    return (
        Tile("Useful tokens/s", speed, note or "the plan, padding not counted"),
        against,
        Tile("Cost per million tokens", price, dearer),
        Tile("Claims", f"{n_claims or 'none'}", counts or "no list of claims was requested"),
    )


def _groups(record: AblationRecord) -> list[tuple[str, Sequence[Bar]]]:
    bars = {bar.name: bar for bar in record.bars}
    groups: list[tuple[str, Sequence[Bar]]] = [
        (f"ladder {bars[names[0]].of}", [bars[name] for name in names]) for names in record.ladders
    ]
    single = facts.single_changes(record)
    return [*groups, ("single changes", single)] if single else groups


def _columns(record: AblationRecord) -> tuple[VariantColumn, ...]:
    no_price, no_memory = record.unavailable.get(NO_PRICE, NOT_MEASURED), NOT_MEASURED
    if record.device == "cpu":
        # On a CPU the entire process would be counted, torch included.
        no_memory = "a CPU has no device memory; the host's is not the variant's alone"
    return (
        VariantColumn("tokens/s", "tokens_per_s", "short"),
        VariantColumn("$/M tokens", NO_PRICE, "usd_rate", no_price),
        VariantColumn("peak memory", "peak_memory_bytes", "size", no_memory),
        VariantColumn("padding", "padding_fraction", "percent"),
        VariantColumn("data wait", "data_wait_fraction", "percent"),
    )  # fmt: skip
