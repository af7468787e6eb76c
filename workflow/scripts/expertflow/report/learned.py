"""Decide what the evaluation shows beyond chance, and sum the run up in one sentence."""

import math
from typing import Any

from expertflow.report import format as f
from expertflow.report.measured import NO_REASON
from expertflow.report.records import Learned

Report = dict[str, Any]
Evaluation = dict[str, Any]
Change = dict[str, Any]

NOT_ASKED = "not_asked"  # the kind of verdict on a question that no model saw
BETTER, WORSE, NO_CHANGE = "better", "worse", "no measurable change"
LOSSES = {"held_out_loss": "nats a token", "perplexity": ""}  # lower is better, with their units
# A 95 % interval reaches 1.96 standard errors; detecting a true difference in 80 % of repetitions
# takes 1.96 + 0.84 of them (the usual two-sided test at 5 %).
SEEN_IN_80_PERCENT = (1.959964 + 0.841621) / 1.959964
# What the evaluation shows and its sentence; unclear where chance alone could explain it.
Answer = tuple[Learned, str]
ANSWERS = {"yes": ("good", "Yes."), "no": ("bad", "No."), "unclear": ("mixed", "Not shown.")}
BY_LOSS = "Training chose its weights by this very loss, so the change is optimistic."
LEARNED: dict[str, Learned] = {BETTER: "yes", WORSE: "no", NO_CHANGE: "unclear"}


def metric_change(evaluation: Evaluation) -> Change | None:
    return next((c for c in evaluation["changes"] if c["quantity"] not in LOSSES), None)


def loss_change(evaluation: Evaluation) -> Change | None:
    return next((c for c in evaluation["changes"] if c["quantity"] == "held_out_loss"), None)


def deciding_change(evaluation: Evaluation) -> Change | None:
    """Return the change in the metric, or in the loss if the task has none; null if unscored."""
    is_loss = evaluation["task"] == "held_out_loss"
    return loss_change(evaluation) if is_loss else metric_change(evaluation)


def is_chosen_by_loss(report: Report) -> bool:
    """Return whether the held-out loss decides and training selected its weights by it.

    The lowest of several losses on the same documents is lower by chance too.
    """
    training, settings = report["training_report"]["training"], report["training_parameters"]
    change = deciding_change(report["evaluation"])
    if change is None or change["quantity"] not in LOSSES or n_choices(report) < 2:
        return False
    return bool(
        training["published_step"] != training["steps"]
        or settings["load_best_model_at_end"]
        or settings["patience"] is not None
    )


def n_choices(report: Report) -> int:
    points = report["training_report"]["training"]["eval_points"]
    return sum(point["step"] > 0 for point in points)


def why_no_baseline(evaluation: Evaluation) -> str | None:
    """Return why a score has no baseline; null if it has one or the manifest asks for none."""
    if evaluation["after"]["value_fraction"] is None or best_baseline(evaluation) is not None:
        return None
    why: str = evaluation["unavailable"].get("baselines", NO_REASON)
    return None if why.startswith("evaluation.") else why


def best_baseline(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return the highest-scoring baseline; in a tie, the one the expert beats least surely."""
    scored = [b for b in evaluation["baselines"] if b["value_fraction"] is not None]
    return max(
        scored,
        key=lambda b: (b["value_fraction"], -b["change"]["ci95"][0] if b["change"] else 0.0),
        default=None,
    )


def size(change: Change) -> str:
    if change["quantity"] in LOSSES:
        return f"{f.signed(change['difference'], 3)} {LOSSES[change['quantity']]}".rstrip()
    return f"{f.points(change['difference'])} points"


def interval(change: Change) -> str:
    digits, scale = (3, 1) if change["quantity"] in LOSSES else (1, 100)
    return " to ".join(f.signed(scale * end, digits) for end in change["ci95"])


def spelled(change: Change) -> str:
    return f"{size(change)}, 95 % interval {interval(change)}"


def n_more_to_see(change: Change) -> int | None:
    """Estimate how many more questions would show a difference of the measured size.

    The standard error is half the interval over 1.96 and shrinks with the square root of the number
    of questions; the answer is for 80 % power. Null where the difference is zero.

    >>> n_more_to_see({"difference": 0.02, "ci95": (-0.02, 0.06), "n": 100})
    718
    """
    low, high = change["ci95"]
    if not change["difference"] or high <= low:
        return None
    half = (high - low) / 2
    needed: float = change["n"] * (SEEN_IN_80_PERCENT * half / abs(change["difference"])) ** 2
    return max(1, math.ceil(needed) - int(change["n"]))


def errors(evaluation: Evaluation) -> list[tuple[str, int]]:
    kinds = evaluation["after"]["n_by_kind"] or {}
    wrong = [(kind, n) for kind, n in kinds.items() if kind != "correct" and n]
    return sorted(wrong, key=lambda item: (-item[1], item[0]))


def verdict(report: Report) -> dict[str, str]:
    """Answer "did it learn?", with a level for its color and a supporting sentence.

    A change counts only if its 95 % interval over the same questions excludes zero, and then only
    if the expert also beats the best answer without a model. The held-out loss decides for a task
    without a metric, never for one that could not be scored.
    """
    learned, said = _learned(report)
    level, answer = ANSWERS[learned]
    bars = report["acceptance"]
    n_failed = sum(item["verdict"] == "fail" for item in bars)
    if level == "good" and n_failed:
        level, answer = "mixed", f"Yes, but {n_failed} of {len(bars)} acceptance bars failed."
    sentences = (said, _time(report), _largest_loss(report))
    return {
        "level": level,
        "learned": learned,
        "answer": answer,
        "sentence": " ".join(s for s in sentences if s).replace(f.NBSP, " "),
    }


def _learned(report: Report) -> Answer:
    evaluation = report["evaluation"]
    if evaluation["documents_shared_with_training"]:
        return "unclear", "Held-out documents were trained on, so the evaluation shows nothing."
    change = deciding_change(evaluation)
    if change is None:
        return _not_compared(report)
    if change["quantity"] in LOSSES:
        said = _loss_sentence(evaluation)
        said += f" {BY_LOSS}" if is_chosen_by_loss(report) else ""
        return LEARNED[change["change"]], said
    return _against_baseline(evaluation, change)


def _against_baseline(evaluation: Report, change: Report) -> Answer:
    learned, sentence = LEARNED[change["change"]], _metric_sentence(evaluation, change)
    if why := why_no_baseline(evaluation):
        alone = f"No answer without a model was compared with it: {why.rstrip('. ')}."
        return learned, f"{sentence} {alone}"
    best = best_baseline(evaluation)
    if best is None or best["change"] is None:
        return learned, sentence
    about = f"({best['name']}, {f.tenths(best['value_fraction'])}): {spelled(best['change'])}."
    if best["change"]["change"] == BETTER:
        return learned, f"{sentence} It beats the best answer without a model {about}"
    if best["change"]["change"] == WORSE:
        return "no", f"{sentence} It is worse than answering without a model {about}"
    equal = (
        f"It does not measurably beat answering without a model {about} Nothing of use is shown."
    )
    return "no" if learned == "no" else "unclear", f"{sentence} {equal}"


def _metric_sentence(evaluation: Report, change: Report) -> str:
    before, after = (f.tenths(evaluation[side]["value_fraction"]) for side in ("before", "after"))
    verb = {BETTER: "rose", WORSE: "fell", NO_CHANGE: "went"}[change["change"]]
    text = f"{f.sentence(f.words(evaluation['metric']))} {verb} from {before} to {after}"
    text += f" on {f.number_of(change['n'], 'held-out question')}"
    if change["change"] != NO_CHANGE:
        return f"{text} ({spelled(change)})."
    unclear = f"{text}: no measurable change ({spelled(change)})."
    moved = loss_change(evaluation)
    fell = moved is not None and moved["change"] == BETTER
    return f"{unclear} {_loss_sentence(evaluation)}" if fell else unclear


def _loss_sentence(evaluation: Report) -> str:
    before, after = (f.loss(evaluation[side]["held_out_loss"]) for side in ("before", "after"))
    losses, change = f"from {before} to {after} nats a token", loss_change(evaluation)
    if change is None:
        return f"Held-out loss went {losses}, without an interval."
    losses += f" on {f.number_of(change['n'], 'held-out document')}"
    span = f"95 % interval of the change {interval(change)}"
    if change["change"] == NO_CHANGE:
        return f"Held-out loss went {losses}: no measurable change ({span})."
    verb = "fell" if change["change"] == BETTER else "rose"
    return f"Held-out loss {verb} {losses} ({span})."


def _not_compared(report: Report) -> Answer:
    evaluation, reasons = report["evaluation"], report["unavailable"]
    if evaluation["task"] == "held_out_loss":
        why = reasons.get("evaluation.delta.held_out_loss_ci95", "")
    elif evaluation["after"]["value_fraction"] is None:
        why = f"the task was not scored: {reasons.get('evaluation.after.value_fraction', '')}"
    else:
        why = reasons.get("evaluation.delta.ci95", "")
    said = f"{f.sentence(why.rstrip('. '))}. " if why else ""
    return "unclear", said + _loss_sentence(evaluation)


def _time(report: Report) -> str:
    goodput, mfu = (report["throughput"][f"{name}_fraction"] for name in ("goodput", "mfu"))
    if goodput is None:
        return ""
    paid = "paid " if report["cost"]["usd"] is not None else ""
    at = f", at {f.percent(mfu)} MFU" if mfu is not None else ""
    wall = f.duration(report["time"]["wall_s"])
    return f"{f.percent(goodput)} of the {paid}{wall} trained the model{at}."


def _largest_loss(report: Report) -> str:
    priced = [item for item in report["findings"] if item["worth_usd"] is not None]
    if not priced:
        return ""
    worst = max(priced, key=lambda item: item["worth_usd"])
    return f"The largest avoidable loss, up to {f.usd(worst['worth_usd'])}: {worst['evidence']}."
