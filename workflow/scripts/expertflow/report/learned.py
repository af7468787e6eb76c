"""Decide what the evaluation shows beyond chance, and sum up the run in one sentence."""

from msgspec.structs import replace

from expertflow.evaluate.records import EvaluationRecord, PairedChange
from expertflow.evaluate.statistics import MIN_DIFFERING
from expertflow.report import format as f
from expertflow.report.derive import MEASURED_ON_CPU
from expertflow.report.measured import NO_REASON, Missing, convert_value, is_measured
from expertflow.report.records import Baseline, Evaluation, Learned, Report, Verdict
from expertflow.train.records import EvalPoint

NOT_ASKED = "not_asked"  # the kind of verdict on a question that no model saw
BETTER, WORSE, NO_CHANGE = "better", "worse", "no measurable change"
LOSSES = {"held_out_loss": "nats per token", "perplexity": ""}  # lower is better, with their units
# What the evaluation shows and its sentence; unclear if chance alone could explain it.
Answer = tuple[Learned, str]
ANSWERS: dict[Learned, Verdict] = {
    "yes": Verdict(level="good", learned="yes", answer="Yes.", sentence=""),
    "no": Verdict(level="bad", learned="no", answer="No.", sentence=""),
    "unclear": Verdict(level="mixed", learned="unclear", answer="Inconclusive.", sentence=""),
}
TOO_FEW = "Too few held-out documents for a verdict."
BY_LOSS = "Training chose its weights by this same loss, so the change is optimistic."
# Below this, evaluations of one run differ by chance; our judgment.
RISE_NATS, RISE_FRACTION = 0.01, 0.02
LEARNED: dict[str, Learned] = {BETTER: "yes", WORSE: "no", NO_CHANGE: "unclear"}


def metric_change(evaluation: Evaluation | EvaluationRecord) -> PairedChange | None:
    return next((c for c in evaluation.changes if c.quantity not in LOSSES), None)


def loss_change(evaluation: Evaluation | EvaluationRecord) -> PairedChange:
    return next(c for c in evaluation.changes if c.quantity == "held_out_loss")


def deciding_change(evaluation: Evaluation) -> PairedChange | None:
    """Return the change in the metric, or in the loss if the task has none; None if unscored."""
    is_loss = evaluation.task == "held_out_loss"
    return loss_change(evaluation) if is_loss else metric_change(evaluation)


def is_chosen_by_loss(report: Report) -> bool:
    """Return whether the held-out loss decides and training selected its weights by it.

    The lowest of several losses on the same documents is lower by chance too.
    """
    training, settings = report.training_report.training, report.training_parameters
    change = deciding_change(report.evaluation)
    if change is None or change.quantity not in LOSSES or n_choices(report) < 2:
        return False
    # Patience ends a run by that loss, whichever step is published then.
    is_chosen = training.published_step != training.steps or settings.load_best_model_at_end
    return is_chosen or is_measured(settings.patience)


def lowest_before_rise(report: Report) -> EvalPoint | None:
    """Return the evaluation from which the held-out loss rose while that of training fell.

    Null if it had not risen notably by the last evaluation: there was no overfitting.
    """
    training = report.training_report.training
    points = training.eval_points
    # If both losses rise, training diverged and memorized nothing.
    if len(points) < 2 or training.loss_last >= training.loss_first:
        return None
    lowest, last = min(points, key=lambda point: point.loss), points[-1]
    notable = max(RISE_NATS, RISE_FRACTION * lowest.loss)
    return lowest if last.loss - lowest.loss > notable else None


def _overfitting(report: Report) -> str:
    lowest = lowest_before_rise(report)
    if lowest is None:
        return ""
    last = report.training_report.training.eval_points[-1]
    return (
        f"It overfitted: from step {lowest.step:,} to {last.step:,} the held-out loss rose from"
        f" {f.loss(lowest.loss)} to {f.loss(last.loss)} while the training loss fell."
    )


def n_choices(report: Report) -> int:
    return sum(point.step > 0 for point in report.training_report.training.eval_points)


def why_no_baseline(evaluation: Evaluation) -> str | None:
    """Return why a score has no baseline; None if it has one or the manifest asks for none."""
    if not is_measured(evaluation.after.value_fraction) or best_baseline(evaluation) is not None:
        return None
    why = evaluation.unavailable.get("baselines", NO_REASON)
    return None if why.startswith("evaluation.") else why


def best_baseline(evaluation: Evaluation) -> Baseline | None:
    """Return the highest-scoring baseline; in a tie, the one the expert beats least surely."""
    return max(
        evaluation.baselines,
        # The low end of its interval: the smaller, the less sure the expert is ahead.
        key=lambda b: (b.value_fraction or 0.0, -b.change.ci95[0]),
        default=None,
    )


def format_difference(change: PairedChange) -> str:
    if change.quantity in LOSSES:
        return f"{f.with_sign(change.difference, 3)} {LOSSES[change.quantity]}".rstrip()
    return f"{f.points(change.difference)} points"


def count_pairs(change: PairedChange) -> str:
    unit = "held-out document" if change.quantity in LOSSES else "held-out question"
    return f.number_of(change.n, unit)


def has_spread(change: PairedChange) -> bool:
    """Return whether resamples vary: not those of equal differences, or of a single group."""
    low, high = change.ci95
    return low < high


def format_interval(change: PairedChange) -> str:
    if not has_spread(change):
        return f"no interval: all changed equally, or form one group{_too_few(change)}"
    # Losses in nats, scores in points of a hundred.
    digits, scale = (3, 1) if change.quantity in LOSSES else (1, 100)
    return " to ".join(f.with_sign(scale * end, digits) for end in change.ci95) + _too_few(change)


def format_change(change: PairedChange) -> str:
    name = ", 95 % interval" if has_spread(change) else ";"
    return f"{format_difference(change)}{name} {format_interval(change)}"


def _too_few(change: PairedChange) -> str:
    """Return why a change does not count although its interval excludes zero."""
    low, high = change.ci95
    if change.change != NO_CHANGE or low <= 0 <= high:
        return ""
    # If enough questions or documents differ, it is their groups that are too few.
    n_differing = change.n
    if change.quantity not in LOSSES:
        n_differing = round(abs(change.difference) * change.n)
    groups = "groups " if n_differing >= MIN_DIFFERING else ""
    return f"; too few {groups}of the {change.n:,} differ to be conclusive"


def count_errors(evaluation: Evaluation) -> list[tuple[str, int]]:
    kinds = evaluation.after.n_by_kind or {}
    wrong = [(kind, n) for kind, n in kinds.items() if kind != "correct" and n]
    return sorted(wrong, key=lambda item: (-item[1], item[0]))


def judge_run(report: Report) -> Verdict:
    """Answer "did it learn?", with a level for its color and a supporting sentence.

    A change counts only if its 95 % interval over the same questions excludes zero, and then only
    if the expert also beats the best answer without a model. The held-out loss decides for a task
    without a metric, never for one that could not be scored.
    """
    learned, evidence = _answer(report)
    verdict, n_bars = ANSWERS[learned], len(report.acceptance)
    n_failed = sum(bar.verdict == "fail" for bar in report.acceptance)
    if learned == "unclear" and report.evaluation.held_out_documents < MIN_DIFFERING:
        verdict = replace(verdict, answer=TOO_FEW)
        evidence += f" At least {MIN_DIFFERING} are needed to show a change; add records."
    # A failed bar lowers a yes; the other answers are already low.
    if learned == "yes" and n_failed:
        answer = f"Yes, but {n_failed} of {n_bars} acceptance bars failed."
        verdict = replace(verdict, level="mixed", answer=answer)
    others = (of(report) for of in (_starting_loss, _overfitting, _time, _largest_loss))
    sentence = " ".join(filter(None, (evidence, *others))).replace(f.NBSP, " ")
    return replace(verdict, sentence=sentence)


def _starting_loss(report: Report) -> str:
    lora, points = report.model.lora, report.training_report.training.eval_points
    if not is_measured(lora) or lora.init_from is None:
        return ""
    start = "".join(f", from a loss of {f.loss(point.loss)}" for point in points if point.step == 0)
    return f"The comparison is with the base model, but this training continued an adapter{start}."


def _answer(report: Report) -> Answer:
    evaluation = report.evaluation
    change = deciding_change(evaluation)
    if change is None:
        value = evaluation.after.value_fraction
        why = value.reason.rstrip(". ") if isinstance(value, Missing) else NO_REASON
        return "unclear", f"The task was not scored: {why}. {_loss_sentence(evaluation)}"
    if change.quantity in LOSSES:
        by_loss = f" {BY_LOSS}" if is_chosen_by_loss(report) else ""
        return LEARNED[change.change], _loss_sentence(evaluation) + by_loss
    return _against_baseline(evaluation, change)


def _against_baseline(evaluation: Evaluation, change: PairedChange) -> Answer:
    learned, sentence = LEARNED[change.change], _metric_sentence(evaluation, change)
    if why := why_no_baseline(evaluation):
        alone = f"It was not compared with answers without a model: {why.rstrip('. ')}."
        return learned, f"{sentence} {alone}"
    best = best_baseline(evaluation)
    if best is None:
        return learned, sentence
    scored = convert_value(best.value_fraction, f.tenths)
    about = f"({f.words(best.name)}, {scored}): {format_change(best.change)}."
    if best.change.change == BETTER:
        return learned, f"{sentence} It beats the best answer without a model {about}"
    if best.change.change == WORSE:
        return "no", f"{sentence} It is worse than answering without a model {about}"
    equal = f"It does not measurably beat answering without a model {about} No benefit is shown."
    # Worse than untrained stays that, whatever the baseline.
    return "no" if learned == "no" else "unclear", f"{sentence} {equal}"


def _metric_sentence(evaluation: Evaluation, change: PairedChange) -> str:
    sides = (evaluation.before, evaluation.after)
    before, after = (convert_value(side.value_fraction, f.tenths) for side in sides)
    verb = {BETTER: "rose", WORSE: "fell", NO_CHANGE: "went"}[change.change]
    text = f"{f.sentence(f.words(str(evaluation.metric)))} {verb} from {before} to {after}"
    text += f" on {count_pairs(change)}"
    if change.change != NO_CHANGE:
        return f"{text} ({format_change(change)})."
    unclear = f"{text}: {NO_CHANGE} ({format_change(change)})."
    # The loss moves before the score does: something was learned.
    fell = loss_change(evaluation).change == BETTER
    return f"{unclear} {_loss_sentence(evaluation)}" if fell else unclear


def _loss_sentence(evaluation: Evaluation) -> str:
    before, after = (f.loss(side.held_out_loss) for side in (evaluation.before, evaluation.after))
    losses, change = f"from {before} to {after} nats per token", loss_change(evaluation)
    losses += f" on {count_pairs(change)}"
    span = format_interval(change)
    if has_spread(change):
        span = f"95 % interval of the change {span}"
    if change.change == NO_CHANGE:
        return f"Held-out loss went {losses}: {NO_CHANGE} ({span})."
    verb = "fell" if change.change == BETTER else "rose"
    return f"Held-out loss {verb} {losses} ({span})."


def _time(report: Report) -> str:
    goodput, mfu = report.throughput.goodput_fraction, report.throughput.mfu_fraction
    if not is_measured(goodput):
        return ""
    paid = "paid " if is_measured(report.cost.usd) else ""
    is_on_cpu = report.training_report.hardware.gpu.peak_source == MEASURED_ON_CPU
    peak = f"of {MEASURED_ON_CPU}" if is_on_cpu else "MFU"
    at = f", at {f.percent(mfu)} {peak}" if is_measured(mfu) else ""
    wall = f.duration(report.time.wall_s)
    return f"{f.percent(goodput)} of the {paid}{wall} went into training{at}."


def _largest_loss(report: Report) -> str:
    priced = [(x.worth_usd, x.evidence) for x in report.findings if x.worth_usd is not None]
    if not priced:
        return ""
    usd, evidence = max(priced, key=lambda item: item[0])
    return f"The largest avoidable loss, up to {f.usd(usd)}: {evidence}."
