"""Findings on what was learned, against chance, no model at all, and earlier runs."""

from expertflow.report import learned
from expertflow.report.findings.evidence import Findings, make_finding
from expertflow.report.format import loss, number_of, percent, tenths, words
from expertflow.report.learned import BETTER, LOSSES, NO_CHANGE, NOT_ASKED, WORSE, format_change
from expertflow.report.measured import Missing, convert_value
from expertflow.report.records import Report

MIN_ANSWERS = 20  # a share of fewer says little
CUT_OFF_LIMIT = 0.05
SHARED_LIMIT = 0.01
INTERVAL = "a 95 % interval of the change that excludes zero, and six pairs that differ"
PAIRED = "paired bootstrap"
MORE_QUESTIONS = (
    "; more held-out questions (evaluation.max_examples, data.eval_fraction) narrow the interval"
)
# Far below what training gains, far above what rounding of a merge in fp32 does.
MOVED_LIMIT = 1e-4  # nats per target
REPORTED = "missing measurements are reported"
RUNS_ALONE = "resolve that reason; then only evaluate_expert runs again"


def find_regression(report: Report) -> Findings:
    earlier = report.evaluation.earlier
    if earlier and earlier.change and earlier.change.change == WORSE:
        change = earlier.change
        yield make_finding(
            "regression",
            severity="problem",
            evidence=f"{words(change.quantity)} is worse than in the evaluation of"
            f" {earlier.evaluated_at}: {format_change(change)}, on {change.n:,} questions asked"
            " both times",
            threshold=INTERVAL,
            origin=PAIRED,
            recommendation=f"keep using the earlier weights ({earlier.weights_sha256[:12]}),"
            " and compare the settings, data and provenance of the two reports",
        )


def find_unscored_task(report: Report) -> Findings:
    task, value = report.evaluation.task, report.evaluation.after.value_fraction
    if task != "held_out_loss" and isinstance(value, Missing):
        yield make_finding(
            "task-not-scored",
            evidence=f"{words(task)} was not scored: {value.reason}",
            threshold="a score for a task with a metric",
            origin=REPORTED,
            recommendation=RUNS_ALONE,
        )


def find_unbeaten_baseline(report: Report) -> Findings:
    if why := learned.why_no_baseline(report.evaluation):
        yield make_finding(
            "no-baseline",
            evidence=f"the expert was not compared with answers without a model: {why}",
            threshold="a score without a model, unless evaluation.baselines is false",
            origin=REPORTED,
            recommendation="resolve that reason; until then, nothing shows that the task needs a"
            " model at all",
        )
    best = learned.best_baseline(report.evaluation)
    if best is None or best.change.change == BETTER:
        return
    is_worse = best.change.change == WORSE
    word = "is worse than" if is_worse else "is not measurably better than"
    yield make_finding(
        "baseline-not-beaten",
        severity="problem" if is_worse else "warning",
        evidence=f"the expert {word} answering without a model ({words(best.name)},"
        f" {convert_value(best.value_fraction, tenths)}): {format_change(best.change)}",
        threshold=INTERVAL,
        origin=PAIRED,
        recommendation=f"see what this baseline does ({best.description}): that much of the task"
        f" needs no model; then {_train_longer(report)}, use more varied examples or a larger model"
        + ("" if is_worse else MORE_QUESTIONS),
    )


def find_no_gain(report: Report) -> Findings:
    change = learned.deciding_change(report.evaluation)
    if change is None:
        return
    about = f"{format_change(change)}, on {learned.count_pairs(change)}"
    answers, more = "; check what the worst answers have in common", MORE_QUESTIONS
    if change.quantity in LOSSES:  # there are no answers
        answers, more = "", "; more held-out documents (data.eval_fraction) narrow the interval"
    if change.change == WORSE:
        yield make_finding(
            "worse-than-untrained",
            severity="problem",
            evidence=f"{words(change.quantity)} is worse than the untrained model's: {about}",
            threshold=INTERVAL,
            origin=PAIRED,
            recommendation=f"use a lower learning rate or fewer epochs{answers}; check whether the"
            " data answers as the task requires",
        )
    if change.change == NO_CHANGE:
        yield make_finding(
            "no-measurable-change",
            evidence=f"{words(change.quantity)}: {NO_CHANGE}: {about}",
            threshold=INTERVAL,
            origin=PAIRED,
            recommendation=f"{_train_longer(report)}{answers}{more}",
        )


def find_overfitting(report: Report) -> Findings:
    lowest, training = learned.lowest_before_rise(report), report.training_report.training
    if lowest is None:
        return
    last, published = training.eval_points[-1], report.evaluation.published.step
    fix = (
        f"stop near step {lowest.step:,} (training.max_steps, or training.patience), or publish it"
        " (training.load_best_model_at_end); more data, a lower rank or learning rate delay the"
        " rise"
        if lowest.step
        else "use a lower learning rate, or data more like the held-out documents: no step got"
        " below the untrained model's loss"
    )
    yield make_finding(
        "overfitting",
        severity="warning" if published == training.steps else "info",
        evidence=f"the held-out loss rose from {loss(lowest.loss)} after step {lowest.step:,} to"
        f" {loss(last.loss)} after step {last.step:,}, while the training loss fell to"
        f" {loss(training.loss_last)}",
        threshold=f"a rise of at most {percent(learned.RISE_FRACTION)} from the lowest",
        recommendation=fix,
    )


def _train_longer(report: Report) -> str:
    if learned.lowest_before_rise(report) is not None:
        return "train on more data, not longer: see overfitting"
    return "train longer or with a higher learning rate if the training loss is still falling"


def find_choice_by_loss(report: Report) -> Findings:
    training, settings = report.training_report.training, report.training_parameters
    by = ["training.load_best_model_at_end"] if settings.load_best_model_at_end else []
    by += ["training.patience"] if settings.patience else []
    if learned.is_chosen_by_loss(report):
        yield make_finding(
            "chosen-by-held-out-loss",
            severity="info",
            evidence=f"step {training.published_step:,} of {training.steps:,} was chosen after"
            f" {learned.n_choices(report):,} evaluations on the same held-out documents"
            + (f" ({', '.join(by)})" if by else "")
            + ": the change in that loss is optimistic, and its interval does not account for the"
            " choice",
            threshold="weights chosen without the reported documents",
            origin="the lowest of several is lower by chance too",
            recommendation="use a task with a metric, which chooses by questions that it does not"
            " report, or the last step (no load_best_model_at_end, no patience)",
        )


def find_bad_answers(report: Report) -> Findings:
    after = report.evaluation.after
    n = after.n_examples or 0
    n_cut, n_left = after.n_cut_off or 0, (after.n_by_kind or {}).get(NOT_ASKED, 0)
    if n >= MIN_ANSWERS and n_cut > CUT_OFF_LIMIT * n:
        yield make_finding(
            "answers-cut-off",
            evidence=f"{n_cut:,} of {number_of(n, 'answer')} were cut off before they ended",
            threshold=f"at most {percent(CUT_OFF_LIMIT)}",
            recommendation="raise evaluation.max_new_tokens; if these answers repeat themselves,"
            " the expert has not learned to stop: check whether the end of the turn is trained on",
        )
    if n_left:
        yield make_finding(
            "questions-not-asked",
            severity="warning" if n_left > CUT_OFF_LIMIT * n else "info",
            evidence=f"{n_left:,} of {number_of(n, 'question')} were not asked and count as wrong:"
            " their prompts leave no position for an answer",
            threshold=f"none; a warning above {percent(CUT_OFF_LIMIT)}",
            recommendation="shorten the prompts, or use a base model with more positions",
        )


def find_shared_questions(report: Report) -> Findings:
    evaluation = report.evaluation
    n, n_all = evaluation.n_questions_shared_with_training, evaluation.held_out_documents
    if n:
        yield make_finding(
            "questions-shared",
            severity="warning" if n > SHARED_LIMIT * n_all else "info",
            evidence=f"{n:,} of {number_of(n_all, 'held-out document')} ask a question that is also"
            " trained on, with another answer",
            threshold="none; a warning above " + percent(SHARED_LIMIT),
            recommendation="keep related documents on one side of the split (group of the"
            " source), or leave out questions with several answers",
        )


def find_export_shift(report: Report) -> Findings:
    export, change = report.export, learned.loss_change(report.evaluation)
    before, after = export.loss_before_merge, export.loss_after_merge
    # Either way: a merge that lowers the loss is also wrong.
    if abs(after - before) > MOVED_LIMIT:
        yield make_finding(
            "export-moved-loss",
            evidence=f"the exported model's held-out loss is {after:.5f}, the trained one's"
            f" {before:.5f} ({export.dtype}); training changed it by {format_change(change)}",
            threshold=f"at most {MOVED_LIMIT:g} nats per token apart",
            recommendation="export in fp32 (export.dtype), if that much matters for this task"
            if export.dtype != "float32"
            else "none: fp32 rounds least; the adapter itself is in the checkpoint",
        )
