"""Rules over comparisons that a verdict lacks or should not lean on."""

from expertflow.report.finding import NO_LOSS, Report, finding
from expertflow.report.format import sentence
from expertflow.report.learned import is_chosen_by_loss, n_choices, why_no_baseline
from expertflow.report.records import Finding

SAID = "what is not measured is said"


def no_baseline(report: Report) -> Finding | None:
    """Find a score that no answer without a model was compared with, though it was asked for."""
    why = why_no_baseline(report["evaluation"])
    if why is None:
        return None
    return finding(
        "no-baseline",
        evidence=f"no answer without a model was compared with the expert's: {why}",
        threshold="a score without a model, unless evaluation.baselines is false",
        origin=SAID,
        recommendation=(
            "see that reason; until it is gone, nothing shows that the task needs a model at all"
        ),
        worth=(None, NO_LOSS),
    )


def chosen_by_loss(report: Report) -> Finding | None:
    """Say where the loss that decides is the one that training chose its weights by."""
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
        recommendation=(
            "a task with a metric, which chooses by other questions than it reports; or the last"
            " step (no load_best_model_at_end, no patience)"
        ),
        worth=(None, NO_LOSS),
    )


def checkpoints_not_compared(report: Report) -> Finding | None:
    """Say where training kept several checkpoints and the metric did not choose among them."""
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
        recommendation=(
            "see that reason; more held-out documents (data.eval_fraction) leave questions to"
            " choose by (evaluation.n_selection_examples)"
        ),
        worth=(None, NO_LOSS),
    )
