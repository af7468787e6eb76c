"""What the page says of the evaluation: answers first, then the tables behind them."""

from typing import Any

from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.report import format as f
from expertflow.report.learned import (
    BETTER,
    NO_CHANGE,
    WORSE,
    best_baseline,
    deciding_change,
    errors,
    interval,
    loss_change,
    metric_change,
    size,
)

Report = dict[str, Any]
Sample = dict[str, Any]

N_WORST_OPEN = 3
N_RIGHT = 2
N_OTHERS = 6
COLOURS = {BETTER: "good", WORSE: "bad", NO_CHANGE: "mixed"}
NO_DIFFERENCE = "no measurable difference"


class Range(Record, frozen=True, kw_only=True):
    """A score with its interval, to draw. ``colour`` names a CSS variable."""

    label: str
    fraction: float
    ci95: tuple[float, float] | None
    colour: str
    is_model: bool


class Line(Record, frozen=True, kw_only=True):
    """One of the answers at the top; ``level`` colours it, empty where nothing is judged."""

    label: str
    text: str
    note: str = ""
    level: str = ""


class ScoreRow(Record, frozen=True, kw_only=True):
    """A measurement of both sides, with intervals; ``is_same``: its change is not measurable."""

    label: str
    unit: str
    before: str
    after: str
    before_band: str
    after_band: str
    change: str
    change_band: str
    is_same: bool


class Shown(Record, frozen=True, kw_only=True):
    """Samples in three groups: wrong ones at once, further wrong ones folded, some right ones."""

    worst: list[Sample]
    folded: list[Sample]
    others: list[Sample]
    others_title: str


def ranges(report: Report) -> list[Range]:
    evaluation = report["evaluation"]
    named = [
        ("Before", evaluation["before"], "grey", True),
        ("After", evaluation["after"], "blue", True),
        *((b["name"], b, "purple", False) for b in evaluation["baselines"]),
    ]
    return [
        Range(
            label=label,
            fraction=scored["value_fraction"],
            ci95=scored["ci95"],
            colour=colour,
            is_model=is_model,
        )
        for label, scored, colour, is_model in named
        if scored["value_fraction"] is not None
    ]


def lines(report: Report) -> list[Line]:
    evaluation = report["evaluation"]
    best, earlier = best_baseline(evaluation), evaluation["earlier"]
    found = [_changed("Against the untrained model", deciding_change(evaluation))]
    if best is not None:
        label = f"Against answers without a model, at best {f.words(best['name'])}"
        found.append(_changed(label, best["change"], same=NO_DIFFERENCE))
    if earlier is not None:
        found.append(_earlier(report, earlier))
    return [*(line for line in found if line), _published(report), *_wrong(evaluation)]


def _changed(
    label: str, change: dict[str, Any] | None, *, same: str = NO_CHANGE, note: str = ""
) -> Line | None:
    if change is None:
        return None
    word = same if change["change"] == NO_CHANGE else change["change"]
    return Line(
        label=label,
        text=f"{f.sentence(word)}: {size(change)} ({interval(change)})",
        note=note,
        level=COLOURS[change["change"]],
    )


def _earlier(report: Report, earlier: dict[str, Any]) -> Line:
    label = "Against the earlier evaluation"
    about = f"of {earlier['evaluated_at'][:10]}, weights {earlier['weights_sha256'][:10]}"
    shared = f"{about}; the same {f.number_of(earlier['n_shared_questions'], 'question')}"
    line = _changed(label, earlier["change"], same=NO_DIFFERENCE, note=shared)
    if line is None:
        why = report["unavailable"].get("evaluation.earlier.change", "not compared")
        return Line(label=label, text=f.sentence(why), note=about)
    return replace(line, level="same") if line.level == "mixed" else line


def _published(report: Report) -> Line:
    published = report["evaluation"]["published"]
    last = report["training_report"]["training"]["steps"]
    return Line(
        label="Published weights",
        text=f"Step {published['step']:,} of {last:,}",
        note=published["reason"],
    )


def _wrong(evaluation: dict[str, Any]) -> list[Line]:
    after = evaluation["after"]
    if after["n_by_kind"] is None or not after["n_examples"]:
        return []
    kinds = [f"{f.words(kind)}{f.NBSP}{n:,}" for kind, n in errors(evaluation)]
    text = ", ".join(kinds[:4]) + (", and others" if len(kinds) > 4 else "")
    cut = after["n_cut_off"]
    note = f"{f.number_of(cut, 'answer')} cut off before the end" if cut else ""
    n_wrong = after["n_examples"] - (after["n_correct"] or 0)
    return [Line(label=f"What goes wrong, {n_wrong:,} of {after['n_examples']:,}",
                 text=f.sentence(text) if text else "Nothing", note=note)]  # fmt: skip


def score_rows(report: Report) -> list[ScoreRow]:
    evaluation = report["evaluation"]
    before, after = evaluation["before"], evaluation["after"]
    rows = []
    if before["value_fraction"] is not None and after["value_fraction"] is not None:
        name = f.sentence(f.words(evaluation["metric"]))
        rows.append(_row(name, "", "value_fraction", "ci95", evaluation, metric_change(evaluation)))
    change = loss_change(evaluation)
    rows.append(
        _row("Held-out loss", "nats a token", "held_out_loss", "held_out_loss_ci95", evaluation,
             change)
    )  # fmt: skip
    rows.append(_row("Perplexity", "", "perplexity", "perplexity_ci95", evaluation, None))
    return rows


def _row(
    label: str, unit: str, key: str, band: str, evaluation: Report, change: dict[str, Any] | None
) -> ScoreRow:
    show = {"value_fraction": f.tenths, "held_out_loss": f.loss, "perplexity": f.short}[key]
    sides = [evaluation["before"], evaluation["after"]]
    before, after = (show(side[key]) for side in sides)
    bands = [f"{show(s[band][0])} to {show(s[band][1])}" if s[band] else "" for s in sides]
    difference = ""
    if key == "held_out_loss":
        difference = f.signed(evaluation["delta"]["held_out_loss"], 3)
    elif key == "value_fraction":
        difference = f"{f.points(evaluation['delta']['value_fraction'])} points"
    return ScoreRow(
        label=label, unit=unit, before=before, after=after, before_band=bands[0],
        after_band=bands[1], change=difference, change_band=interval(change) if change else "",
        is_same=change is not None and change["change"] == NO_CHANGE,
    )  # fmt: skip


def kinds(evaluation: dict[str, Any]) -> list[tuple[str, int, int]]:
    before = evaluation["before"]["n_by_kind"] or {}
    after = evaluation["after"]["n_by_kind"] or {}
    names = sorted({*before, *after}, key=lambda k: (k != "correct", -after.get(k, 0), k))
    return [(name, before.get(name, 0), after.get(name, 0)) for name in names]


def judge_text(report: Report) -> str:
    judge = report["evaluation"]["judge"]
    if judge is None:
        return ""
    counted = f"{judge['n_wins']:,} preferred, {judge['n_losses']:,} not, {judge['n_ties']:,} ties"
    if judge["n_inconsistent"]:
        counted += f" ({judge['n_inconsistent']:,} where the order decided)"
    if judge["n_failed"]:
        why = f" ({judge['reason']})" if judge["reason"] else ""
        counted += f", {judge['n_failed']:,} failed{why}"
    took = [f"{f.number_of(judge['n_pairs'], 'pair')}, each in both orders: {counted}"]
    if None not in (judge["n_input_tokens"], judge["n_output_tokens"]):
        took.append(f"{f.short(judge['n_input_tokens'] + judge['n_output_tokens'])} tokens")
    if judge["usd"] is not None:
        took.append(f.usd(judge["usd"]))
    return "; ".join(took)


def left_out(report: Report) -> list[tuple[str, str]]:
    evaluation, reasons = report["evaluation"], report["unavailable"]
    if evaluation["task"] == "held_out_loss":
        return []
    unscored = reasons.get("evaluation.after.value_fraction")
    parts = ("baselines", "judge", "lm_eval")
    said = [(part, evaluation["unavailable"].get(part, "")) for part in parts]
    chosen = "evaluation."  # a setting is named: evaluation.judge is not set
    return [
        (f.words(part), why)
        for part, why in said
        if why and why != unscored and not why.startswith(chosen)
    ]


def how(report: Report) -> str:
    evaluation, decoding = report["evaluation"], report["evaluation"]["decoding"]
    if evaluation["after"]["n_examples"] in (None, 0):
        return ""
    drawn = "greedy"
    if decoding["temperature"]:
        drawn = f"temperature {decoding['temperature']:g}, top-p {decoding['top_p']:g}"
        drawn += f", top-k {decoding['top_k']}" if decoding["top_k"] else ""
    stop = [f"stopped at {', '.join(map(repr, decoding['stop']))}"] if decoding["stop"] else []
    tools = [f"{name} {version}" for name, version in evaluation["tools"].items()]
    scored = [f"scored with {', '.join(tools)}"] if tools else []
    return f"Answers: {', '.join([evaluation['backend'], drawn, *stop, *scored])}."


def samples(evaluation: dict[str, Any]) -> Shown:
    worst, kept = evaluation["worst"], evaluation["samples"]
    if not worst:
        return Shown(worst=[], folded=[], others=kept[:N_OTHERS], others_title="Answers")
    right = [sample for sample in kept if sample["kind_after"] == "correct"]
    return Shown(
        worst=worst[:N_WORST_OPEN],
        folded=worst[N_WORST_OPEN:],
        others=right[:N_RIGHT],
        others_title="Right answers",
    )
