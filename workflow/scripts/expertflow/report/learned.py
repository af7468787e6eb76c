"""What the evaluation shows beyond chance: which comparisons decide, and how they are said."""

import math
from typing import Any

from expertflow.report import format as f
from expertflow.report.measured import NO_REASON

Report = dict[str, Any]
Evaluation = dict[str, Any]
Change = dict[str, Any]

NOT_ASKED = "not_asked"  # the kind of verdict on a question that no model saw
BETTER, WORSE, NO_CHANGE = "better", "worse", "no measurable change"
LOSSES = {"held_out_loss": "nats a token", "perplexity": ""}  # lower is better, with their units
# A 95 % interval reaches 1.96 standard errors; to see a true difference in 80 % of repetitions it
# must be 1.96 + 0.84 of them (the usual two-sided test at 5 %).
SEEN_IN_80_PERCENT = (1.959964 + 0.841621) / 1.959964


def metric_change(evaluation: Evaluation) -> Change | None:
    return next((c for c in evaluation["changes"] if c["quantity"] not in LOSSES), None)


def loss_change(evaluation: Evaluation) -> Change | None:
    return next((c for c in evaluation["changes"] if c["quantity"] == "held_out_loss"), None)


def deciding_change(evaluation: Evaluation) -> Change | None:
    """Return the change that answers for the expert: of its metric, and of the loss if it has none.

    A task that could not be scored is not answered for by its loss.
    """
    is_loss = evaluation["task"] == "held_out_loss"
    return loss_change(evaluation) if is_loss else metric_change(evaluation)


def is_chosen_by_loss(report: Report) -> bool:
    """Return whether the held-out loss decides, and training already chose its weights by it.

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
    """Return why a score has no baseline beside it; null where it has one or asked for none.

    The record names the setting where it is the manifest that asks for none.
    """
    if evaluation["after"]["value_fraction"] is None or best_baseline(evaluation) is not None:
        return None
    why: str = evaluation["unavailable"].get("baselines", NO_REASON)
    return None if why.startswith("evaluation.") else why


def best_baseline(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return the one that scores highest; of equals, the one that the expert beats least surely."""
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
    """Estimate how many more questions would show a difference of the size that was measured.

    The standard error is half the interval over 1.96 and shrinks with the root of the number of
    questions; the answer is for 80 % power. Null where the difference is zero.

    >>> n_more_to_see({"difference": 0.02, "ci95": (-0.02, 0.06), "n": 100})
    718
    """
    low, high = change["ci95"]
    if not change["difference"] or high <= low:
        return None
    half = (high - low) / 2
    needed: float = change["n"] * (SEEN_IN_80_PERCENT * half / abs(change["difference"])) ** 2
    return max(1, math.ceil(needed) - int(change["n"]))


def n_not_asked(evaluation: Evaluation) -> int:
    return int((evaluation["after"]["n_by_kind"] or {}).get(NOT_ASKED, 0))


def errors(evaluation: Evaluation) -> list[tuple[str, int]]:
    kinds = evaluation["after"]["n_by_kind"] or {}
    wrong = [(kind, n) for kind, n in kinds.items() if kind != "correct" and n]
    return sorted(wrong, key=lambda item: (-item[1], item[0]))
