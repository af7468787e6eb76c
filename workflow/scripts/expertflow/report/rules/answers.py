"""Rules over the answers: cut off, wrong in one way, known already, or judged otherwise."""

from expertflow.report.finding import NO_LOSS, Report, finding
from expertflow.report.format import number_of, percent, tenths, words
from expertflow.report.learned import (
    BETTER,
    NOT_ASKED,
    WORSE,
    errors,
    metric_change,
    n_not_asked,
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


def cut_off(report: Report) -> Finding | None:
    """Find answers that were longer than they may be."""
    after = report["evaluation"]["after"]
    n_cut, n = after["n_cut_off"], after["n_examples"]
    if not n or n_cut is None or n < MIN_ANSWERS or n_cut <= CUT_OFF_LIMIT * n:
        return None
    return finding(
        "answers-cut-off",
        evidence=f"{n_cut:,} of {number_of(n, 'answer')} were cut off before they ended",
        threshold=f"at most {percent(CUT_OFF_LIMIT)}",
        recommendation=(
            "raise evaluation.max_new_tokens; if these answers repeat themselves, the expert has"
            " not learned to end: see whether the end of the turn is trained on"
        ),
        worth=(None, NO_LOSS),
    )


def not_asked(report: Report) -> Finding | None:
    """Find questions that were longer than the model can read, and count as wrong."""
    n_left, n = n_not_asked(report["evaluation"]), report["evaluation"]["after"]["n_examples"]
    if not n_left:
        return None
    return finding(
        "questions-not-asked",
        severity="warning" if n_left > CUT_OFF_LIMIT * n else "info",
        evidence=(
            f"{n_left:,} of {number_of(n, 'question')} were not asked and count as wrong: their"
            " prompts leave the model no position to answer in"
        ),
        threshold=f"none; a warning above {percent(CUT_OFF_LIMIT)}",
        recommendation="shorten the prompts, or take a base model with more positions",
        worth=(None, NO_LOSS),
    )


def one_kind_of_error(report: Report) -> Finding | None:
    """Find a single fault of form behind many of the answers."""
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
        worth=(None, NO_LOSS),
    )


def shared_questions(report: Report) -> Finding | None:
    """Find held-out questions that were trained on with another answer."""
    evaluation = report["evaluation"]
    n, n_all = evaluation["n_questions_shared_with_training"], evaluation["held_out_documents"]
    if not n:
        return None
    return finding(
        "questions-shared",
        severity="warning" if n > SHARED_LIMIT * n_all else "info",
        evidence=(
            f"{n:,} of {number_of(n_all, 'held-out document')} ask what is also trained on, with"
            " another answer"
        ),
        threshold="none; a warning above " + percent(SHARED_LIMIT),
        recommendation=(
            "keep what belongs together on one side of the split (group of the source), or"
            " leave out questions that have several answers"
        ),
        worth=(None, NO_LOSS),
    )


def judge_disagrees(report: Report) -> Finding | None:
    """Find a judge who prefers the model that the metric says is worse."""
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
        evidence=(
            f"the judge prefers the {model} ({tenths(judge['win_fraction'])} for the expert, 95 %"
            f" interval {tenths(low)} to {tenths(high)}), {words(change['quantity'])} is"
            f" {change['change']} than before"
        ),
        threshold="the same side, where both intervals take one",
        recommendation=(
            "read some of these pairs: either the judge's criterion asks for something else, or the"
            " metric does"
        ),
        worth=(None, NO_LOSS),
    )


def judge_failed(report: Report) -> Finding | None:
    """Say where a judge left pairs unjudged."""
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
        worth=(None, NO_LOSS),
    )


def judge_inconsistent(report: Report) -> Finding | None:
    """Find a judge who goes by the position of an answer."""
    judge = report["evaluation"]["judge"]
    if judge is None:
        return None
    n = judge["n_wins"] + judge["n_losses"] + judge["n_ties"]
    if n < MIN_ANSWERS or judge["n_inconsistent"] <= INCONSISTENT_LIMIT * n:
        return None
    return finding(
        "judge-inconsistent",
        evidence=(
            f"the judge contradicted itself on {judge['n_inconsistent']:,} of"
            f" {number_of(n, 'pair')} when the two answers changed places"
        ),
        threshold=f"at most {percent(INCONSISTENT_LIMIT)}",
        recommendation="another judge, or a narrower evaluation.judge.criterion",
        worth=(None, NO_LOSS),
    )
