"""Findings on what was learned: beyond chance, beyond no model at all, beyond earlier runs."""

from collections.abc import Callable

from expertflow.report.findings.evidence import Report, finding
from expertflow.report.format import loss, number_of, percent, sentence, tenths, words
from expertflow.report.learned import (
    BETTER,
    NO_CHANGE,
    NOT_ASKED,
    WORSE,
    best_baseline,
    deciding_change,
    errors,
    is_chosen_by_loss,
    loss_change,
    metric_change,
    n_choices,
    n_more_to_see,
    n_not_asked,
    spelled,
    why_no_baseline,
)
from expertflow.report.records import Finding

MIN_ANSWERS = 20  # a share of fewer says little
CUT_OFF_LIMIT = 0.05
KIND_LIMIT = 0.20
SHARED_LIMIT = 0.01
INCONSISTENT_LIMIT = 1 / 3
# An answer of these kinds has the right form and says the wrong thing: that is what is learned
# last, and no fault of its own.
SIMPLY_WRONG = ("wrong", "different", "tests_failed", "failed")
NO_FORM = (*SIMPLY_WRONG, NOT_ASKED)
FORM = (
    "the answers miss the form that is asked for: see the worst of them, put the form into the"
    " prompt of the manifest, and train on more examples that keep it"
)
ADVICE = {
    "timed_out": "see the worst answers for joins or loops without an end, and whether examples"
    " that are trained on run out of time too",
    "too_many_rows": "see the worst answers for a missing condition or join",
    "empty": "the expert ends at once: see whether the prompt of the manifest ends where the"
    " answers that are trained on begin, and whether decoding.stop stands at their beginning",
}
INTERVAL = "a 95 % interval of the change that leaves zero out, and six pairs that differ"
PAIRED = "paired bootstrap over the same questions"
# Far below what training gains, far above what rounding of a merge in fp32 does.
MOVED_LIMIT = 1e-4  # nats a target
SAID = "what is not measured is said"


def leak(report: Report) -> Finding | None:
    shared = report["evaluation"]["documents_shared_with_training"]
    if shared == 0:
        return None
    return finding(
        "held-out-leak",
        severity="problem",
        evidence=f"{shared} held-out documents were also trained on",
        threshold="none",
        origin="definition of held-out",
        recommendation="prepare the data again; figures of this evaluation mean nothing",
    )


def regression(report: Report) -> Finding | None:
    earlier = report["evaluation"]["earlier"]
    if earlier is None or earlier["change"] is None or earlier["change"]["change"] != WORSE:
        return None
    change = earlier["change"]
    return finding(
        "regression",
        severity="problem",
        evidence=f"{words(change['quantity'])} is worse than in the evaluation of"
        f" {earlier['evaluated_at']}: {spelled(change)}, on {change['n']:,} that were asked"
        " both times",
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=f"keep the earlier weights ({earlier['weights_sha256'][:12]}) in use, and"
        " compare the settings, data and provenance of the two reports",
    )


def not_scored(report: Report) -> Finding | None:
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
    )


def no_baseline(report: Report) -> Finding | None:
    why = why_no_baseline(report["evaluation"])
    if why is None:
        return None
    return finding(
        "no-baseline",
        evidence=f"no answer without a model was compared with the expert's: {why}",
        threshold="a score without a model, unless evaluation.baselines is false",
        origin=SAID,
        recommendation="see that reason; until it is gone, nothing shows that the task needs a"
        " model at all",
    )


def baseline_not_beaten(report: Report) -> Finding | None:
    best = best_baseline(report["evaluation"])
    if best is None or best["change"] is None or best["change"]["change"] == BETTER:
        return None
    is_worse = best["change"]["change"] == WORSE
    said = "is worse than" if is_worse else "is not measurably better than"
    return finding(
        "baseline-not-beaten",
        severity="problem" if is_worse else "warning",
        evidence=f"the expert {said} answering without a model ({best['name']},"
        f" {tenths(best['value_fraction'])}): {spelled(best['change'])}",
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=(
            f"see what this baseline does ({best['description']}): so much of the task needs no"
            " model; then train longer, on more varied examples, or a larger model"
            + _more_questions(best["change"])
        ),
    )


def no_change(report: Report) -> Finding | None:
    change = deciding_change(report["evaluation"])
    if change is None or change["change"] != NO_CHANGE:
        return None
    return finding(
        "no-measurable-change",
        evidence=f"{words(change['quantity'])} did not measurably change: {spelled(change)}, on"
        f" {number_of(change['n'], 'held-out question')}",
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=(
            "train longer or with a higher learning rate if the training loss still falls; see"
            " what the worst answers have in common" + _more_questions(change)
        ),
    )


def _more_questions(change: Report) -> str:
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
    scale: int = 10 ** max(0, len(str(n)) - 2)
    return -(-n // scale) * scale


def chosen_by_loss(report: Report) -> Finding | None:
    if not is_chosen_by_loss(report):
        return None
    training, settings = report["training_report"]["training"], report["training_parameters"]
    listed = ("load_best_model_at_end", "patience")
    by = [f"training.{name}" for name in listed if settings[name]]
    return finding(
        "chosen-by-held-out-loss",
        severity="info",
        evidence=sentence(
            f"step {training['published_step']:,} of {training['steps']:,} counts after"
            f" {n_choices(report):,} evaluations on the same held-out documents"
            + (f" ({', '.join(by)})" if by else "")
            + ": the change of that loss is optimistic, and its interval knows nothing of the"
            " choice"
        ),
        threshold="weights chosen without the documents that are reported",
        origin="the lowest of several is lower by chance too",
        recommendation="a task with a metric, which chooses by other questions than it reports; or"
        " the last step (no load_best_model_at_end, no patience)",
    )


def cut_off(report: Report) -> Finding | None:
    after = report["evaluation"]["after"]
    n_cut, n = after["n_cut_off"], after["n_examples"]
    if not n or n_cut is None or n < MIN_ANSWERS or n_cut <= CUT_OFF_LIMIT * n:
        return None
    return finding(
        "answers-cut-off",
        evidence=f"{n_cut:,} of {number_of(n, 'answer')} were cut off before they ended",
        threshold=f"at most {percent(CUT_OFF_LIMIT)}",
        recommendation="raise evaluation.max_new_tokens; if these answers repeat themselves, the"
        " expert has not learned to end: see whether the end of the turn is trained on",
    )


def not_asked(report: Report) -> Finding | None:
    n_left, n = n_not_asked(report["evaluation"]), report["evaluation"]["after"]["n_examples"]
    if not n_left:
        return None
    return finding(
        "questions-not-asked",
        severity="warning" if n_left > CUT_OFF_LIMIT * n else "info",
        evidence=f"{n_left:,} of {number_of(n, 'question')} were not asked and count as wrong:"
        " their prompts leave the model no position to answer in",
        threshold=f"none; a warning above {percent(CUT_OFF_LIMIT)}",
        recommendation="shorten the prompts, or take a base model with more positions",
    )


def one_kind_of_error(report: Report) -> Finding | None:
    n = report["evaluation"]["after"]["n_examples"]
    found = [e for e in errors(report["evaluation"]) if not e[0].startswith(NO_FORM)]
    if not n or n < MIN_ANSWERS or not found or found[0][1] <= KIND_LIMIT * n:
        return None
    kind, n_kind = found[0]
    return finding(
        "one-kind-of-error",
        evidence=f"{n_kind:,} of {number_of(n, 'answer')} are wrong in one way: {words(kind)}",
        threshold=f"at most {percent(KIND_LIMIT)} that are wrong in form",
        recommendation=ADVICE.get(kind, FORM),
    )


def shared_questions(report: Report) -> Finding | None:
    evaluation = report["evaluation"]
    n, n_all = evaluation["n_questions_shared_with_training"], evaluation["held_out_documents"]
    if not n:
        return None
    return finding(
        "questions-shared",
        severity="warning" if n > SHARED_LIMIT * n_all else "info",
        evidence=f"{n:,} of {number_of(n_all, 'held-out document')} ask what is also trained on,"
        " with another answer",
        threshold="none; a warning above " + percent(SHARED_LIMIT),
        recommendation="keep what belongs together on one side of the split (group of the source),"
        " or leave out questions that have several answers",
    )


def judge_disagrees(report: Report) -> Finding | None:
    judge, change = report["evaluation"]["judge"], metric_change(report["evaluation"])
    if judge is None or judge["ci95"] is None or change is None:
        return None
    low, high = judge["ci95"]
    prefers = BETTER if low > 0.5 else WORSE if high < 0.5 else None
    if prefers is None or {prefers, change["change"]} != {BETTER, WORSE}:
        return None
    model = "expert" if prefers == BETTER else "untrained model"
    return finding(
        "judge-disagrees",
        evidence=f"the judge prefers the {model} ({tenths(judge['win_fraction'])} for the expert,"
        f" 95 % interval {tenths(low)} to {tenths(high)}), {words(change['quantity'])} is"
        f" {change['change']} than before",
        threshold="the same side, where both intervals take one",
        recommendation="read some of these pairs: either the judge's criterion asks for something"
        " else, or the metric does",
    )


def judge_inconsistent(report: Report) -> Finding | None:
    judge = report["evaluation"]["judge"]
    if judge is None:
        return None
    n = judge["n_wins"] + judge["n_losses"] + judge["n_ties"]
    if n < MIN_ANSWERS or judge["n_inconsistent"] <= INCONSISTENT_LIMIT * n:
        return None
    return finding(
        "judge-inconsistent",
        evidence=f"the judge contradicted itself on {judge['n_inconsistent']:,} of"
        f" {number_of(n, 'pair')} when the two answers changed places",
        threshold=f"at most {percent(INCONSISTENT_LIMIT)}",
        recommendation="another judge, or a narrower evaluation.judge.criterion",
    )


def judge_failed(report: Report) -> Finding | None:
    judge = report["evaluation"]["judge"]
    if judge is None or not judge["n_failed"]:
        return None
    why = f": {judge['reason']}" if judge["reason"] else ""
    return finding(
        "judge-failed",
        severity="info",
        evidence=f"{judge['n_failed']:,} of {number_of(judge['n_pairs'], 'pair')} got no"
        f" verdict{why}",
        threshold="none",
        origin="a fallback is said",
        recommendation="see that reason; evaluate_expert runs alone again once it is gone",
    )


def export_moved(report: Report) -> Finding | None:
    export = report["export"]
    before, after = export["loss_before_merge"], export["loss_after_merge"]
    if abs(after - before) <= MOVED_LIMIT:
        return None
    change = loss_change(report["evaluation"])
    gained = f"; training changed it by {spelled(change)}" if change else ""
    return finding(
        "export-moved-loss",
        severity="warning",
        evidence=f"the exported model's held-out loss is {after:.5f}, the trained one's"
        f" {before:.5f} ({export['dtype']}){gained}",
        threshold=f"at most {MOVED_LIMIT:g} nats a token apart",
        recommendation="export in fp32 (export.dtype), if so much matters for this task",
    )


def another_checkpoint(report: Report) -> Finding | None:
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
    )


def checkpoints_not_compared(report: Report) -> Finding | None:
    evaluation, published = report["evaluation"], report["evaluation"]["published"]
    n = report["training_report"]["training"]["n_candidates"]
    if evaluation["metric"] is None or n < 2 or published["candidates"]:
        return None
    return finding(
        "checkpoints-not-compared",
        severity="info",
        evidence=f"{n:,} checkpoints were kept, none was compared: {published['reason']}",
        threshold="the best of those that were kept",
        origin=SAID,
        recommendation="see that reason; more held-out documents (data.eval_fraction) leave"
        " questions to choose by (evaluation.n_selection_examples)",
    )


RULES: tuple[Callable[[Report], Finding | None], ...] = (
    leak, regression, not_scored, no_baseline, baseline_not_beaten, no_change, chosen_by_loss,
    cut_off, not_asked, one_kind_of_error, shared_questions, judge_disagrees, judge_inconsistent,
    judge_failed, export_moved, another_checkpoint, checkpoints_not_compared,
)  # fmt: skip
