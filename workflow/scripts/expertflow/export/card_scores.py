"""What a model card says of the evaluation: before and after, baselines, other judges."""

from collections.abc import Iterator

from expertflow.evaluate.records import (
    EvaluationRecord,
    EvaluationSide,
    PairedChange,
    Published,
    TaskScore,
)
from expertflow.export.card_text import interval, number, plain, table


def score_lines(evaluation: EvaluationRecord, *, method: str) -> list[str]:
    """Give the section on the evaluation."""
    return [
        "## Evaluation",
        "",
        f"On {evaluation.n_held_out_documents:,} held-out documents, of which training saw"
        f" {evaluation.n_documents_shared_with_training}; 95 % intervals in brackets. Task"
        f" {plain(evaluation.task)}.",
        "",
        *_base_note(method),
        *table(("", "before training", "after"), _rows(evaluation.before, evaluation.after)),
        *_changes(evaluation.changes),
        *_baselines(evaluation),
        *_others(evaluation),
        *(f"- {plain(what)}: {plain(why)}" for what, why in sorted(evaluation.unavailable.items())),
        "",
    ]


def published_lines(published: Published) -> list[str]:
    """Say which step's weights these are and why, with the table of those to choose from."""
    rows = (
        (
            f"{candidate.step:,}{' (published)' if candidate.published else ''}",
            number(candidate.held_out_loss),
            _score(candidate.score),
        )
        for candidate in published.candidates
    )
    chosen = table(("step", "held-out loss", "on the questions of the choice"), rows)
    lines = [f"- Published: the weights after step {published.step:,} ({plain(published.reason)})"]
    if not chosen:
        return lines
    apart = f"{published.n_questions} questions, which the reported scores leave out"
    return [*lines, "", f"Kept checkpoints, asked {apart}:", "", *chosen]


def _rows(before: EvaluationSide, after: EvaluationSide) -> Iterator[tuple[str, str, str]]:
    if before.score is not None and after.score is not None:
        questions = f"{after.score.n_examples:,} questions"
        yield f"{plain(after.score.metric)}, {questions}", _score(before.score), _score(after.score)
    yield (
        f"held-out loss, nats a token of {after.n_target_tokens:,}",
        interval(before.held_out_loss, before.held_out_loss_ci95),
        interval(after.held_out_loss, after.held_out_loss_ci95),
    )
    yield (
        "perplexity",
        interval(before.perplexity, before.perplexity_ci95),
        interval(after.perplexity, after.perplexity_ci95),
    )


def _score(score: TaskScore) -> str:
    if score.value_fraction is None:
        return f"not measured: {plain(score.reason or 'no reason was noted')}"
    return interval(score.value_fraction, score.ci95)


def _changes(changes: tuple[PairedChange, ...]) -> list[str]:
    lines = [f"- After less before, {_change(change)}" for change in changes]
    return [*lines, ""] if lines else []


def _change(change: PairedChange) -> str:
    return (
        f"{plain(change.quantity)}: {change.difference:+.4g}"
        f" ({change.ci95[0]:+.4g} to {change.ci95[1]:+.4g}, n = {change.n:,}):"
        f" **{change.change}**"
    )


def _baselines(evaluation: EvaluationRecord) -> list[str]:
    rows = (
        (
            f"{plain(baseline.name)}: {plain(baseline.description)}",
            _score(baseline.score),
            "not compared" if baseline.change is None else _change(baseline.change),
        )
        for baseline in evaluation.baselines
    )
    return table(("answering without a model", "scores", "the expert less this"), rows)


def _others(evaluation: EvaluationRecord) -> list[str]:
    """Repeat what other judges said; a harness's own task has its own name."""
    lines = []
    if (earlier := evaluation.earlier) is not None and earlier.change is not None:
        lines.append(f"- This run less the one before it, {_change(earlier.change)}")
    if (judge := evaluation.judge) is not None:
        lines.append(
            f"- Judged by {plain(judge.model)} on {judge.n_pairs} pairs, positions swapped: wins"
            f" {judge.n_wins}, ties {judge.n_ties}, losses {judge.n_losses}, failed"
            f" {judge.n_failed}; win share {interval(judge.win_fraction, judge.ci95)}"
        )
    lines += [
        f"- lm-evaluation-harness, {plain(score.task)}, {plain(score.metric)}: before"
        f" {number(score.before)}, after {number(score.after)} (standard error"
        f" {number(score.after_stderr)})"
        for score in evaluation.lm_eval
    ]
    return [*lines, ""] if lines else []


def _base_note(method: str) -> list[str]:
    if method != "qlora":
        return []
    return ["Before and after are both scored on the base in 4 bits, as it was trained on.", ""]
