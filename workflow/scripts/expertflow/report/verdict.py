"""Sum a run up in one sentence: did it learn, was the time well spent, and what was lost."""

from typing import Any

from expertflow.report import learned as le
from expertflow.report.format import NBSP, duration, loss, number_of, percent, tenths, usd, words
from expertflow.report.format import sentence as sentence_case
from expertflow.report.learned import BETTER, LOSSES, NO_CHANGE, WORSE, interval, spelled
from expertflow.report.records import Learned

Report = dict[str, Any]

# What the evaluation says, and the sentence for it; unclear where chance alone may have made it.
Answer = tuple[Learned, str]
ANSWERS = {"yes": ("good", "Yes."), "no": ("bad", "No."), "unclear": ("mixed", "Not shown.")}
BY_LOSS = "Training chose its weights by this very loss, so the change is optimistic."
LEARNED: dict[str, Learned] = {BETTER: "yes", WORSE: "no", NO_CHANGE: "unclear"}


def verdict(report: Report) -> dict[str, str]:
    """Answer "did it learn?", with a level for its colour and a sentence that supports it.

    A change counts only if its 95 % interval over the same questions leaves zero out, and then
    only if the expert also beats the best answer without a model. The held-out loss answers for a
    task without a metric, never for one that could not be scored.
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
        "sentence": " ".join(s for s in sentences if s).replace(NBSP, " "),
    }


def _learned(report: Report) -> Answer:
    evaluation = report["evaluation"]
    if evaluation["documents_shared_with_training"]:
        return "unclear", "Held-out documents were trained on, so the evaluation shows nothing."
    change = le.deciding_change(evaluation)
    if change is None:
        return _not_compared(report)
    if change["quantity"] in LOSSES:
        said = _loss_sentence(evaluation)
        said += f" {BY_LOSS}" if le.is_chosen_by_loss(report) else ""
        return LEARNED[change["change"]], said
    return _against_baseline(evaluation, change)


def _against_baseline(evaluation: Report, change: Report) -> Answer:
    learned, sentence = LEARNED[change["change"]], _metric_sentence(evaluation, change)
    if why := le.why_no_baseline(evaluation):
        alone = f"No answer without a model was compared with it: {why.rstrip('. ')}."
        return learned, f"{sentence} {alone}"
    best = le.best_baseline(evaluation)
    if best is None or best["change"] is None:
        return learned, sentence
    about = f"({best['name']}, {tenths(best['value_fraction'])}): {spelled(best['change'])}."
    if best["change"]["change"] == BETTER:
        return learned, f"{sentence} It beats the best answer without a model {about}"
    if best["change"]["change"] == WORSE:
        return "no", f"{sentence} It is worse than answering without a model {about}"
    equal = (
        f"It does not measurably beat answering without a model {about} Nothing of use is shown."
    )
    return "no" if learned == "no" else "unclear", f"{sentence} {equal}"


def _metric_sentence(evaluation: Report, change: Report) -> str:
    before, after = (tenths(evaluation[side]["value_fraction"]) for side in ("before", "after"))
    verb = {BETTER: "rose", WORSE: "fell", NO_CHANGE: "went"}[change["change"]]
    text = f"{sentence_case(words(evaluation['metric']))} {verb} from {before} to {after}"
    text += f" on {number_of(change['n'], 'held-out question')}"
    if change["change"] != NO_CHANGE:
        return f"{text} ({spelled(change)})."
    unclear = f"{text}: no measurable change ({spelled(change)})."
    moved = le.loss_change(evaluation)
    fell = moved is not None and moved["change"] == BETTER
    return f"{unclear} {_loss_sentence(evaluation)}" if fell else unclear


def _loss_sentence(evaluation: Report) -> str:
    before, after = (loss(evaluation[side]["held_out_loss"]) for side in ("before", "after"))
    losses, change = f"from {before} to {after} nats a token", le.loss_change(evaluation)
    if change is None:
        return f"Held-out loss went {losses}, without an interval."
    losses += f" on {number_of(change['n'], 'held-out document')}"
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
    said = f"{sentence_case(why.rstrip('. '))}. " if why else ""
    return "unclear", said + _loss_sentence(evaluation)


def _time(report: Report) -> str:
    goodput, mfu = (report["throughput"][f"{name}_fraction"] for name in ("goodput", "mfu"))
    if goodput is None:
        return ""
    paid = "paid " if report["cost"]["usd"] is not None else ""
    at = f", at {percent(mfu)} MFU" if mfu is not None else ""
    wall = duration(report["time"]["wall_s"])
    return f"{percent(goodput)} of the {paid}{wall} trained the model{at}."


def _largest_loss(report: Report) -> str:
    priced = [f for f in report["findings"] if f["worth_usd"] is not None]
    if not priced:
        return ""
    worst = max(priced, key=lambda finding: finding["worth_usd"])
    return f"The largest avoidable loss, up to {usd(worst['worth_usd'])}: {worst['evidence']}."
