"""Build the part of report.json about what the model learned."""

from typing import Any

from expertflow.evaluate.records import EvaluationRecord, EvaluationSide
from expertflow.report import records as r
from expertflow.report.learned import loss_change, metric_change
from expertflow.report.measured import Missing, explain, fill

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
    """Build the evaluation section; the reasons for nulls are the record's own."""
    why, published = record.unavailable, record.published
    candidates = tuple(fill(r.Candidate, one, one.score) for one in published.candidates)
    return fill(
        r.Evaluation,
        record,
        metric=record.after.score.metric if record.after.score else _unscored(record),
        before=_side(record, "before"),
        after=_side(record, "after"),
        published=fill(r.PublishedWeights, published, candidates=candidates),
        baselines=tuple(fill(r.Baseline, one, one.score) for one in record.baselines),
        earlier=Missing(why["earlier"])
        if record.earlier is None
        else explain(record.earlier, _reasons(record, "earlier")),
        judge=Missing(why["judge"]) if record.judge is None else explain(record.judge, JUDGE),
        lm_eval=tuple(explain(score, LM_EVAL) for score in record.lm_eval),
        recall=tuple(
            fill(r.Recall, one, one.score, default=one.score.reason) for one in record.recall
        ),
        delta=_delta(record),
    )


def _reasons(record: EvaluationRecord, part: str) -> dict[str, str]:
    """Return the reasons for nulls by field of a part of the record."""
    return {path.removeprefix(f"{part}."): why for path, why in record.unavailable.items()}


def _side(record: EvaluationRecord, name: str) -> r.Side:
    side: EvaluationSide = getattr(record, name)
    why = _reasons(record, name) | _reasons(record, f"{name}.score")
    if side.score is None:
        # Each field its own: a Scored has no single null for all of them.
        missing: Any = {field: Missing(why["score"]) for field in r.Scored.__struct_fields__}
        return fill(r.Side, side, why=why, **missing)
    return fill(r.Side, side, side.score, why=why)


def _unscored(record: EvaluationRecord) -> Missing:
    score = record.after.score
    return Missing(record.unavailable["after.score"] if score is None else str(score.reason))


def _delta(record: EvaluationRecord) -> r.Delta:
    loss, metric = loss_change(record), metric_change(record)
    return r.Delta(
        held_out_loss=loss.difference,
        held_out_loss_ci95=loss.ci95,
        value_fraction=metric.difference if metric else _unscored(record),
        ci95=metric.ci95 if metric else _unscored(record),
    )
