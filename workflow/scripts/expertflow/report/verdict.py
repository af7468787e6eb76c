"""Sum a run up in one sentence: did it learn, was the time well spent, and what was lost."""

from dataclasses import dataclass
from typing import Any, Literal

from expertflow.report.format import (
    NBSP,
    duration,
    loss,
    number_of,
    percent,
    points,
    tenths,
    usd,
    words,
)

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the evaluation says; ``unclear`` where the interval of the change spans zero."""

    learned: Literal["yes", "no", "unclear"]
    sentence: str


ANSWERS = {"yes": ("good", "Yes."), "no": ("bad", "No."), "unclear": ("mixed", "Not shown.")}


def verdict(report: Report) -> dict[str, str]:
    """Answer "did it learn?", with a level for its colour and a sentence that supports it.

    A change of the task's metric counts only if its 95 % interval leaves zero out. Without a
    metric the held-out loss answers, which has no interval.
    """
    found = _learned(report)
    level, answer = ANSWERS[found.learned]
    if level == "good" and (failed := _failed_bars(report)):
        level, answer = "mixed", f"Yes, but {failed}."
    sentences = (found.sentence, _time(report), _largest_loss(report))
    return {
        "level": level,
        "learned": found.learned,
        "answer": answer,
        "sentence": " ".join(s for s in sentences if s).replace(NBSP, " "),
    }


def _learned(report: Report) -> Answer:
    evaluation = report["evaluation"]
    if evaluation["documents_shared_with_training"]:
        leak = "Held-out documents were trained on, so the evaluation shows nothing."
        return Answer(learned="unclear", sentence=leak)
    if evaluation["delta"]["ci95"] is None:
        return _learned_by_loss(evaluation)
    return _learned_by_metric(evaluation)


def _learned_by_metric(evaluation: dict[str, Any]) -> Answer:
    before, after, delta = evaluation["before"], evaluation["after"], evaluation["delta"]
    low, high = delta["ci95"]
    metric = words(evaluation["metric"]).capitalize()
    change = (
        f"from {tenths(before['value_fraction'])} to {tenths(after['value_fraction'])} on "
        f"{number_of(after['n_examples'], 'held-out question')}"
        f" ({points(delta['value_fraction'])} points, "
        f"95 % interval {points(low)} to {points(high)})"
    )
    if low > 0:
        return Answer(learned="yes", sentence=f"{metric} rose {change}.")
    if high < 0:
        return Answer(learned="no", sentence=f"{metric} fell {change}.")
    unclear = f"{metric} went {change}: no clear change."
    if after["held_out_loss"] < before["held_out_loss"]:
        unclear += f" Held-out loss fell {_losses(before, after)}."
    return Answer(learned="unclear", sentence=unclear)


def _learned_by_loss(evaluation: dict[str, Any]) -> Answer:
    before, after = evaluation["before"], evaluation["after"]
    change = f"{_losses(before, after)} nats a token"
    if after["held_out_loss"] < before["held_out_loss"]:
        return Answer(learned="yes", sentence=f"Held-out loss fell {change}.")
    return Answer(learned="no", sentence=f"Held-out loss did not fall: {change}.")


def _losses(before: dict[str, Any], after: dict[str, Any]) -> str:
    return f"from {loss(before['held_out_loss'])} to {loss(after['held_out_loss'])}"


def _failed_bars(report: Report) -> str:
    failed = sum(1 for item in report["acceptance"] if item["verdict"] == "fail")
    return f"{failed} of {len(report['acceptance'])} acceptance bars failed" if failed else ""


def _time(report: Report) -> str:
    time, goodput = report["time"], report["throughput"]["goodput_fraction"]
    if goodput is None:
        return ""
    paid = "paid " if report["cost"]["usd"] is not None else ""
    mfu = report["throughput"]["mfu_fraction"]
    at = f", at {percent(mfu)} MFU" if mfu is not None else ""
    return f"{percent(goodput)} of the {paid}{duration(time['wall_s'])} trained the model{at}."


def _largest_loss(report: Report) -> str:
    priced = [f for f in report["findings"] if f["worth_usd"] is not None]
    if not priced:
        return ""
    worst = max(priced, key=lambda finding: finding["worth_usd"])
    return f"The largest avoidable loss, up to {usd(worst['worth_usd'])}: {worst['evidence']}."
