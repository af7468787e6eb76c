"""The part of report.json that says what the model learned."""

from typing import Any

from expertflow.core.records import to_json
from expertflow.evaluate.records import (
    BaselineScore,
    CandidateScore,
    EvaluationRecord,
    EvaluationSide,
    Published,
    TaskScore,
)
from expertflow.report.inputs import ReportInputs
from expertflow.report.learned import loss_change, metric_change


def evaluation_section(inputs: ReportInputs) -> dict[str, Any]:
    """Lay out the evaluation: what was measured, then what it is compared with."""
    record = inputs.evaluation
    section = {
        "task": record.task,
        "metric": record.after.score.metric if record.after.score else None,
        "held_out_documents": record.n_held_out_documents,
        "documents_shared_with_training": record.n_documents_shared_with_training,
        "n_questions_shared_with_training": record.n_questions_shared_with_training,
        "before": _side(record.before),
        "after": _side(record.after),
        "changes": to_json(record.changes),
        "published": _published(record.published),
        "baselines": [_baseline(baseline) for baseline in record.baselines],
        "earlier": to_json(record.earlier),
        "judge": to_json(record.judge),
        "lm_eval": to_json(record.lm_eval),
        "backend": record.backend,
        "decoding": to_json(record.decoding),
        "tools": dict(record.tools),
        "samples": to_json(record.samples),
        "worst": to_json(record.worst),
        "answers_path": record.answers_path,
        "unavailable": dict(record.unavailable),
        "wall_s": record.wall_s,
    }
    return {**section, "delta": _delta(record, section)}


def _delta(record: EvaluationRecord, section: dict[str, Any]) -> dict[str, Any]:
    """Repeat what bars of a manifest point at: after minus before, with the paired intervals."""
    metric, loss = metric_change(section), loss_change(section)
    before, after = section["before"]["value_fraction"], section["after"]["value_fraction"]
    return {
        "held_out_loss": record.after.held_out_loss - record.before.held_out_loss,
        "held_out_loss_ci95": loss["ci95"] if loss else None,
        "value_fraction": None if None in (before, after) else after - before,
        "ci95": metric["ci95"] if metric else None,
    }


def _side(side: EvaluationSide) -> dict[str, Any]:
    return {
        "held_out_loss": side.held_out_loss,
        "held_out_loss_ci95": to_json(side.held_out_loss_ci95),
        "perplexity": side.perplexity,
        "perplexity_ci95": to_json(side.perplexity_ci95),
        "n_target_tokens": side.n_target_tokens,
        "n_documents": side.n_documents,
        **_score(side.score),
        "generation_s": side.generation_s,
        "n_generated_tokens": side.n_generated_tokens,
        "n_cut_off": side.n_cut_off,
    }


def _score(score: TaskScore | None) -> dict[str, Any]:
    return {
        "value_fraction": score.value_fraction if score else None,
        "ci95": to_json(score.ci95) if score else None,
        "n_examples": score.n_examples if score else None,
        "n_correct": score.n_correct if score else None,
        "n_by_kind": dict(score.n_by_kind) if score else None,
    }


def _published(published: Published) -> dict[str, Any]:
    return {
        "step": published.step,
        "path": published.path,
        "weights_sha256": published.weights_sha256,
        "reason": published.reason,
        "n_questions": published.n_questions,
        "candidates": [_candidate(candidate) for candidate in published.candidates],
    }


def _candidate(candidate: CandidateScore) -> dict[str, Any]:
    return {
        "step": candidate.step,
        "held_out_loss": candidate.held_out_loss,
        **_score(candidate.score),
        "published": candidate.published,
    }


def _baseline(baseline: BaselineScore) -> dict[str, Any]:
    return {
        "name": baseline.name,
        "description": baseline.description,
        **_score(baseline.score),
        "change": to_json(baseline.change),
    }
