"""Build the part of report.json about what the model learned."""

from typing import Any

from expertflow.evaluate.records import EarlierRun, EvaluationRecord, EvaluationSide, TaskScore
from expertflow.report import records as r
from expertflow.report.learned import loss_change, metric_change
from expertflow.report.measured import Measured, Missing, explain, fill

JUDGE = {
    "win_fraction": "no pair was judged",
    "ci95": "no pair was decided",
    "n_input_tokens": "the endpoint does not count tokens",
    "n_output_tokens": "the endpoint does not count tokens",
    "usd": "no price per token is configured for the judge, or it does not count tokens",
}
LM_EVAL = {
    **dict.fromkeys(("before", "after"), "the harness reported no figure"),
    **dict.fromkeys(
        ("before_stderr", "after_stderr"), "the harness reports no standard error for this metric"
    ),
}


def build_evaluation(record: EvaluationRecord) -> r.Evaluation:
    """Build the evaluation section; the record's own reasons for nulls take precedence."""
    no_metric = f"task {record.task} has no metric beyond the held-out loss"
    after, published = record.after.score, record.published
    candidates = tuple(fill(r.Candidate, one, one.score) for one in published.candidates)
    return fill(
        r.Evaluation,
        record,
        metric=after.metric if after else Missing(no_metric),
        before=_side(record, "before", no_metric),
        after=_side(record, "after", no_metric),
        published=fill(r.PublishedWeights, published, candidates=candidates),
        baselines=tuple(fill(r.Baseline, one, one.score) for one in record.baselines),
        earlier=_earlier(record),
        judge=Missing(record.unavailable.get("judge", "no judge was requested"))
        if record.judge is None
        else explain(record.judge, JUDGE),
        lm_eval=tuple(explain(score, LM_EVAL) for score in record.lm_eval),
        recall=tuple(
            fill(r.Recall, one, one.score, default=_why_unscored(one.score))
            for one in record.recall
        ),
        delta=_delta(record, no_metric),
    )


def _side(record: EvaluationRecord, name: str, no_metric: str) -> r.Side:
    side: EvaluationSide = getattr(record, name)
    recorded = record.unavailable
    because = _why_unscored(side.score, no_metric)
    why = dict.fromkeys(("held_out_loss_ci95", "perplexity_ci95"), "too few documents")
    why["n_cut_off"] = because
    why = {field: recorded.get(f"{name}.{field}", reason) for field, reason in why.items()}
    # The nearest reason: of the field, of the score, of the task.
    scores = {
        field: recorded.get(f"{name}.score.{field}") or recorded.get(f"{name}.score") or because
        for field in r.Scored.__struct_fields__
    }
    if side.score is None:
        # Each field its own: a Scored has no single null for all of them.
        missing: Any = {field: Missing(reason) for field, reason in scores.items()}
        return fill(r.Side, side, why=why, **missing)
    return fill(r.Side, side, side.score, why=why | scores)


def _why_unscored(score: TaskScore | None, missing: str = "") -> str:
    return missing if score is None else score.reason or "not recorded"


def _earlier(record: EvaluationRecord) -> Measured[EarlierRun]:
    earlier, reasons = record.earlier, record.unavailable
    if earlier is None:
        return Missing(reasons.get("earlier", "no earlier evaluation of this expert was found"))
    why = "none of the earlier questions was asked again"
    names = ("value_fraction", "change")
    return explain(earlier, {name: reasons.get(f"earlier.{name}", why) for name in names})


def _delta(record: EvaluationRecord, no_metric: str) -> r.Delta:
    loss, metric = loss_change(record), metric_change(record)
    unscored = Missing(_why_unscored(record.after.score, no_metric))
    return r.Delta(
        held_out_loss=loss.difference,
        held_out_loss_ci95=loss.ci95,
        value_fraction=metric.difference if metric else unscored,
        ci95=metric.ci95 if metric else unscored,
    )
