"""Why figures of the evaluation are missing: what its record says, else what that means."""

from expertflow.evaluate.records import EvaluationRecord, TaskScore

HERE = "evaluation"
SCORE = ("value_fraction", "ci95", "n_examples", "n_correct", "n_by_kind")
WRITTEN = ("generation_s", "n_generated_tokens", "n_cut_off")
NOT_GENERATED = "no text was generated"
NOT_JUDGED = "the text was not judged"
NOT_ASKED_FOR = {
    "judge": "no judge was asked for",
    "earlier": "no earlier evaluation of this expert was found",
}
ALWAYS = {
    f"{HERE}.published.candidates[].held_out_loss": "no held-out loss was measured at this step",
    f"{HERE}.judge.win_fraction": "no pair was judged",
    f"{HERE}.judge.ci95": "no pair was decided",
    f"{HERE}.judge.n_input_tokens": "the endpoint does not count tokens",
    f"{HERE}.judge.n_output_tokens": "the endpoint does not count tokens",
    f"{HERE}.judge.usd": "no price a token is configured for the judge, or it counts none",
    f"{HERE}.lm_eval[].before": "the harness gave no figure",
    f"{HERE}.lm_eval[].after": "the harness gave no figure",
    f"{HERE}.lm_eval[].before_stderr": "the harness gives no standard error for this metric",
    f"{HERE}.lm_eval[].after_stderr": "the harness gives no standard error for this metric",
}


def evaluation_reasons(record: EvaluationRecord) -> dict[str, str]:
    """Map the paths of what an evaluation may lack to reasons; ``[]`` stands for any index."""
    said = {
        f"{HERE}.{path}": reason
        for field, reason in record.unavailable.items()
        for path in _paths(field)
    }
    parts = {f"{HERE}.{part}": reason for part, reason in NOT_ASKED_FOR.items()}
    return {**ALWAYS, **parts, **_sides(record), **_compared(record), **_samples(record), **said}


def _paths(field: str) -> list[str]:
    """Give the places of a record's field in the report, which lays scores out beside losses."""
    side, _, rest = field.partition(".")
    if rest == "score":
        return [f"{side}.{key}" for key in SCORE]
    return [f"{side}.{rest.removeprefix('score.')}" if rest else side]


def _sides(record: EvaluationRecord) -> dict[str, str]:
    no_metric = f"task {record.task} has no metric beyond the held-out loss"
    reasons = {f"{HERE}.metric": no_metric}
    for name, side in (("before", record.before), ("after", record.after)):
        because = _of_score(side.score, no_metric)
        reasons |= {f"{HERE}.{name}.{key}": because for key in (*SCORE, *WRITTEN)}
        single = "one document has no spread" if side.n_documents == 1 else "no spread was measured"
        reasons |= {f"{HERE}.{name}.{key}_ci95": single for key in ("held_out_loss", "perplexity")}
    lacking = next((s.score for s in (record.after, record.before) if not _has(s.score)), None)
    because = _of_score(lacking, no_metric)
    changes = record.unavailable.get("changes", "the two sides were not compared")
    scored = _has(record.before.score) and _has(record.after.score)
    return {
        **reasons,
        f"{HERE}.delta.value_fraction": because,
        f"{HERE}.delta.ci95": changes if scored else because,
        f"{HERE}.delta.held_out_loss_ci95": changes,
    }


def _has(score: TaskScore | None) -> bool:
    return score is not None and score.value_fraction is not None


def _of_score(score: TaskScore | None, missing: str) -> str:
    if score is None:
        return missing
    return score.reason or "not recorded"


def _compared(record: EvaluationRecord) -> dict[str, str]:
    """Explain what a baseline, a checkpoint or the earlier evaluation could not be given."""
    reasons: dict[str, str] = {}
    scored = "the baseline or the expert has no score to compare"
    for index, baseline in enumerate(record.baselines):
        place = f"{HERE}.baselines[{index}]"
        reasons |= {f"{place}.{key}": _of_score(baseline.score, "") for key in SCORE}
        reasons[f"{place}.change"] = scored
    for index, candidate in enumerate(record.published.candidates):
        place = f"{HERE}.published.candidates[{index}]"
        reasons |= {f"{place}.{key}": _of_score(candidate.score, "") for key in SCORE}
    if record.earlier is not None:
        none = "none of the earlier questions was asked again"
        asked = "the earlier evaluation has no score" if record.earlier.n_shared_questions else none
        reasons |= {f"{HERE}.earlier.{key}": asked for key in ("value_fraction", "change")}
    return reasons


def _samples(record: EvaluationRecord) -> dict[str, str]:
    written = {"before": NOT_GENERATED, "after": NOT_GENERATED}
    judged = {"kind_before": NOT_JUDGED, "kind_after": NOT_JUDGED}
    rest = {"reference_loss": "not measured for this question"}
    return {
        f"{HERE}.{shelf}[].{key}": reason
        for shelf in ("samples", "worst")
        for key, reason in {**written, **judged, **rest}.items()
    }
