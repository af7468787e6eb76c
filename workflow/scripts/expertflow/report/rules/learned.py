"""Rules over what was learned: beyond chance, beyond no model at all, beyond earlier runs."""

from expertflow.report.finding import NO_LOSS, Report, finding
from expertflow.report.format import loss, number_of, tenths, words
from expertflow.report.learned import (
    BETTER,
    NO_CHANGE,
    WORSE,
    best_baseline,
    deciding_change,
    loss_change,
    n_more_to_see,
    spelled,
)
from expertflow.report.records import Finding

INTERVAL = "a 95 % interval of the change that leaves zero out, and six pairs that differ"
PAIRED = "paired bootstrap over the same questions"
# Far below what training gains, far above what rounding of a merge in fp32 does.
MOVED_LIMIT = 1e-4  # nats a target


def regression(report: Report) -> Finding | None:
    """Find an expert that is worse than the evaluation before it."""
    earlier = report["evaluation"]["earlier"]
    if earlier is None or earlier["change"] is None or earlier["change"]["change"] != WORSE:
        return None
    change = earlier["change"]
    return finding(
        "regression",
        severity="problem",
        evidence=(
            f"{words(change['quantity'])} is worse than in the evaluation of"
            f" {earlier['evaluated_at']}: {spelled(change)}, on {change['n']:,} that were asked"
            " both times"
        ),
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=(
            f"keep the earlier weights ({earlier['weights_sha256'][:12]}) in use, and compare the"
            " settings, data and provenance of the two reports"
        ),
        worth=(None, NO_LOSS),
    )


def not_scored(report: Report) -> Finding | None:
    """Find a task whose answers could not be judged here."""
    evaluation = report["evaluation"]
    if evaluation["task"] == "held_out_loss" or evaluation["after"]["value_fraction"] is not None:
        return None
    why = report["unavailable"].get("evaluation.after.value_fraction", "no reason was recorded")
    return finding(
        "task-not-scored",
        evidence=f"{words(evaluation['task'])} was not scored: {why}",
        threshold="a score for a task that has one",
        origin="what is not measured is said",
        recommendation="see that reason; evaluate_expert runs alone again once it is gone",
        worth=(None, NO_LOSS),
    )


def baseline_not_beaten(report: Report) -> Finding | None:
    """Find an expert that an answer without a model equals."""
    best = best_baseline(report["evaluation"])
    if best is None or best["change"] is None or best["change"]["change"] == BETTER:
        return None
    is_worse = best["change"]["change"] == WORSE
    said = "is worse than" if is_worse else "is not measurably better than"
    return finding(
        "baseline-not-beaten",
        severity="problem" if is_worse else "warning",
        evidence=(
            f"the expert {said} answering without a model ({best['name']},"
            f" {tenths(best['value_fraction'])}): {spelled(best['change'])}"
        ),
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=(
            f"see what this baseline does ({best['description']}): so much of the task needs no"
            " model; then train longer, on more varied examples, or a larger model"
            + _more_questions(best["change"])
        ),
        worth=(None, NO_LOSS),
    )


def no_change(report: Report) -> Finding | None:
    """Find a run whose change chance alone may have made, and say what would tell."""
    change = deciding_change(report["evaluation"])
    if change is None or change["change"] != NO_CHANGE:
        return None
    return finding(
        "no-measurable-change",
        evidence=(
            f"{words(change['quantity'])} did not measurably change: {spelled(change)}, on"
            f" {number_of(change['n'], 'held-out question')}"
        ),
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=(
            "train longer or with a higher learning rate if the training loss still falls; see"
            " what the worst answers have in common" + _more_questions(change)
        ),
        worth=(None, NO_LOSS),
    )


def _more_questions(change: Report) -> str:
    """Say how many questions would show a difference of this size, where it has one."""
    if change["change"] != NO_CHANGE:
        return ""
    low, high = change["ci95"]
    if not low <= 0 <= high:
        return "; so few answers differ that more questions are needed before any of it is shown"
    n_more = n_more_to_see(change)
    if n_more is None:
        return "; no number of questions shows a difference of zero"
    return (
        f"; if the difference is as measured, about {_rounded(n_more):,} more held-out questions"
        " (evaluation.max_examples, data.eval_fraction) would show it 4 times in 5"
    )


def _rounded(n: int) -> int:
    """Keep two digits: the number rests on an estimate."""
    scale: int = 10 ** max(0, len(str(n)) - 2)
    return -(-n // scale) * scale


def another_checkpoint(report: Report) -> Finding | None:
    """Say where the weights that are published are not those that training would give."""
    evaluation = report["evaluation"]
    published, others = evaluation["published"], evaluation["published"]["candidates"]
    last = report["training_report"]["training"]["steps"]
    measured = [c for c in others if c["held_out_loss"] is not None]
    lowest = min(measured, key=lambda c: (c["held_out_loss"], c["step"]), default=None)
    chosen = next((c for c in others if c["published"]), None)
    is_lowest = (
        lowest is None or chosen is None or chosen["held_out_loss"] == (lowest["held_out_loss"])
    )
    if published["step"] == last and is_lowest:
        return None
    than = "" if published["step"] == last else f", not the last of {last:,}"
    if not is_lowest and lowest is not None:
        than += f"; the lowest held-out loss, {loss(lowest['held_out_loss'])}, is at step"
        than += f" {lowest['step']:,}"
    return finding(
        "another-checkpoint",
        severity="info",
        evidence=f"step {published['step']:,} is published{than}: {published['reason']}",
        threshold="the last step, with the lowest held-out loss",
        origin="a choice is said",
        recommendation=(
            "fewer epochs, if the last steps bring nothing in the next run either"
            if published["step"] != last
            else "nothing: the score counts, not the loss"
        ),
        worth=(None, NO_LOSS),
    )


def export_moved(report: Report) -> Finding | None:
    """Find an export whose loss is not quite that of the trained model."""
    export = report["export"]
    before, after = export["loss_before_merge"], export["loss_after_merge"]
    if abs(after - before) <= MOVED_LIMIT:
        return None
    change = loss_change(report["evaluation"])
    gained = f"; training changed it by {spelled(change)}" if change else ""
    return finding(
        "export-moved-loss",
        severity="warning",
        evidence=(
            f"the exported model's held-out loss is {after:.5f}, the trained one's {before:.5f}"
            f" ({export['dtype']}){gained}"
        ),
        threshold=f"at most {MOVED_LIMIT:g} nats a token apart",
        recommendation="export in fp32 (export.dtype), if so much matters for this task",
        worth=(None, NO_LOSS),
    )
