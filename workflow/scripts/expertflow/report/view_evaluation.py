"""Prepare the evaluation for the page: answers first, then the tables behind them."""

from typing import Any, NamedTuple

from expertflow.report import format as f
from expertflow.report import learned as le
from expertflow.report.learned import BETTER, NO_CHANGE, WORSE

Report = dict[str, Any]

N_WORST_OPEN = 3
N_RIGHT = 2
N_OTHERS = 6
COLORS = {BETTER: "good", WORSE: "bad", NO_CHANGE: "mixed"}
NO_DIFFERENCE = "no measurable difference"


class Line(NamedTuple):
    """One of the answers at the top; ``level`` colors it, empty where nothing is judged."""

    label: str
    text: str
    note: str = ""
    level: str = ""


def learned(report: Report) -> dict[str, Any]:
    evaluation = report["evaluation"]
    before, after = evaluation["before"], evaluation["after"]
    kinds, were = after["n_by_kind"] or {}, before["n_by_kind"] or {}
    names = sorted({*were, *kinds}, key=lambda k: (k != "correct", -kinds.get(k, 0), k))
    sides = [
        ("Before", before, "gray", True),
        ("After", after, "blue", True),
        *((b["name"], b, "purple", False) for b in evaluation["baselines"]),
    ]
    return {
        "is_scored": None not in (before["value_fraction"], after["value_fraction"]),
        "ranges": [
            {"label": label, "fraction": scored["value_fraction"], "ci95": scored["ci95"],
             "color": color, "is_model": is_model}
            for label, scored, color, is_model in sides
            if scored["value_fraction"] is not None
        ],
        "lines": lines(report),
        "rows": _score_rows(evaluation),
        "kinds": [(name, were.get(name, 0), kinds.get(name, 0)) for name in names],
        "judge": _judge_text(evaluation["judge"]),
        "how": how(report),
        "left_out": _left_out(report),
    }  # fmt: skip


def lines(report: Report) -> list[Line]:
    evaluation = report["evaluation"]
    best, published = le.best_baseline(evaluation), evaluation["published"]
    found = [_changed("Against the untrained model", le.deciding_change(evaluation))]
    if best is not None:
        label = f"Against answers without a model, at best {f.words(best['name'])}"
        found.append(_changed(label, best["change"], same=NO_DIFFERENCE))
    if evaluation["earlier"] is not None:
        found.append(_earlier(report, evaluation["earlier"]))
    step = f"Step {published['step']:,} of {report['training_report']['training']['steps']:,}"
    weights = Line("Published weights", step, published["reason"])
    return [*(line for line in found if line), weights, *_wrong(evaluation)]


def _changed(
    label: str, change: Report | None, *, same: str = NO_CHANGE, note: str = ""
) -> Line | None:
    if change is None:
        return None
    word = same if change["change"] == NO_CHANGE else change["change"]
    text = f"{f.sentence(word)}: {le.size(change)} ({le.interval(change)})"
    return Line(label, text, note, COLORS[change["change"]])


def _earlier(report: Report, earlier: Report) -> Line:
    label = "Against the earlier evaluation"
    about = f"of {earlier['evaluated_at'][:10]}, weights {earlier['weights_sha256'][:10]}"
    shared = f"{about}; the same {f.number_of(earlier['n_shared_questions'], 'question')}"
    line = _changed(label, earlier["change"], same=NO_DIFFERENCE, note=shared)
    if line is None:
        why = report["unavailable"].get("evaluation.earlier.change", "not compared")
        return Line(label, f.sentence(why), about)
    return line._replace(level="same") if line.level == "mixed" else line


def _wrong(evaluation: Report) -> list[Line]:
    after = evaluation["after"]
    if after["n_by_kind"] is None or not after["n_examples"]:
        return []
    kinds = [f"{f.words(kind)}{f.NBSP}{n:,}" for kind, n in le.errors(evaluation)]
    text = ", ".join(kinds[:4]) + (", and others" if len(kinds) > 4 else "")
    cut = after["n_cut_off"]
    note = f"{f.number_of(cut, 'answer')} cut off before the end" if cut else ""
    n_wrong = after["n_examples"] - (after["n_correct"] or 0)
    label = f"What goes wrong, {n_wrong:,} of {after['n_examples']:,}"
    return [Line(label, f.sentence(text) or "Nothing", note)]


def _score_rows(evaluation: Report) -> list[dict[str, Any]]:
    """Return metric, loss and perplexity of both sides; ``is_same``: no measurable change."""
    before, after, delta = evaluation["before"], evaluation["after"], evaluation["delta"]
    loss = f.signed(delta["held_out_loss"], 3)
    found: list[tuple[Any, ...]] = [
        ("Held-out loss", "nats a token", "held_out_loss", f.loss, loss, le.loss_change),
        ("Perplexity", "", "perplexity", f.short, "", lambda _: None),
    ]
    if delta["value_fraction"] is not None:
        name, points = f.sentence(f.words(evaluation["metric"])), f.points(delta["value_fraction"])
        metric = (name, "", "value_fraction", f.tenths, f"{points} points", le.metric_change)
        found.insert(0, metric)
    rows = []
    for label, unit, key, show, difference, find in found:
        change, band_key = find(evaluation), "ci95" if key == "value_fraction" else f"{key}_ci95"
        row = {"label": label, "unit": unit, "change": difference}
        for name, side in (("before", before), ("after", after)):
            band = side[band_key]
            row[name] = show(side[key])
            row[f"{name}_band"] = f"{show(band[0])} to {show(band[1])}" if band else ""
        row["change_band"] = le.interval(change) if change else ""
        rows.append({**row, "is_same": change is not None and change["change"] == NO_CHANGE})
    return rows


def _judge_text(judge: Report | None) -> str:
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


def _left_out(report: Report) -> list[tuple[str, str]]:
    """List the parts that are unexpectedly missing, without those that nobody requested."""
    evaluation = report["evaluation"]
    if evaluation["task"] == "held_out_loss":
        return []
    unscored = report["unavailable"].get("evaluation.after.value_fraction")
    # A reason that names a setting is a choice: evaluation.judge is not set.
    return [
        (f.words(part), why)
        for part in ("baselines", "judge", "lm_eval")
        if (why := evaluation["unavailable"].get(part))
        and why != unscored
        and not why.startswith("evaluation.")
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
    tools = ", ".join(f"{name} {version}" for name, version in evaluation["tools"].items())
    scored = [f"scored with {tools}"] if tools else []
    return f"Answers: {', '.join([evaluation['backend'], drawn, *stop, *scored])}."


def samples(evaluation: Report) -> dict[str, Any]:
    worst, kept = evaluation["worst"], evaluation["samples"]
    right = [sample for sample in kept if sample["kind_after"] == "correct"]
    return {
        "worst": worst[:N_WORST_OPEN],
        "folded": worst[N_WORST_OPEN:],
        "others": right[:N_RIGHT] if worst else kept[:N_OTHERS],
        "others_title": "Right answers" if worst else "Answers",
    }
