"""The choice of the published checkpoint, and its reason."""

from pathlib import Path
from typing import Any

import pytest
from made_up_documents import spec
from made_up_documents import training as kept

from expertflow.core.errors import EvaluationError
from expertflow.evaluate import choose_checkpoint as choosing
from expertflow.evaluate.records import Judgment, Published, TaskScore
from expertflow.evaluate.statistics import summarize_judgments


def training(*losses: float, published: int) -> Any:
    """Represent a training that kept steps 10, 20, … with these held-out losses."""
    return kept(dict(zip(range(10, 99, 10), losses, strict=False)), published=published)


def score(n_correct: int, n: int = 40) -> TaskScore:
    return summarize_judgments(
        "accuracy", [Judgment("correct" if i < n_correct else "wrong") for i in range(n)]
    )


def choice(run: Any, *n_correct: int) -> Published:
    scored = dict(zip((c.step for c in run.candidates), map(score, n_correct), strict=True))
    ordered = choosing.order_candidates(run)
    return choosing.choose_best([(c, scored[c.step]) for c in ordered], 40)


def test_the_best_score_wins_and_ties_are_decided_by_loss_and_then_by_step() -> None:
    best = choice(training(0.9, 0.5, 0.7, published=20), 10, 20, 30)
    assert best.reason == (
        "step 30 has the best accuracy of 3 kept checkpoints, 30 of 40 selection questions"
    )
    cases = {(0.9, 0.5, 0.7): 20, (0.9, 0.9, 0.7): 30, (1, 0.5, 0.5): 30}
    for losses, step in cases.items():
        found = choice(training(*losses, published=10), 7, 7, 7)
        assert found.step == step
        assert "tied with 2 others; the lowest held-out loss decides" in found.reason


def test_there_may_be_nothing_to_choose() -> None:
    two = training(0.1, 0.2, published=10)
    changes: dict[str, Any]
    for changes, run, n_questions, unavailable, why in (
        ({}, two, choosing.MIN_QUESTIONS - 1, None, "19 held-out questions are left to choose by"),
        ({}, training(0.1, published=10), 40, None, "training kept no other checkpoint"),
        ({"n_selection_examples": 0}, two, 0, None, "n_selection_examples is 0"),
        ({"n_selection_examples": 19}, two, 19, None, "n_selection_examples is 19, and 20 are"),
        ({"task": "held_out_loss"}, two, 0, None, "has no metric"),
        ({}, two, 0, "Node is missing", "cannot be scored here: Node is missing"),
    ):
        settings = spec(**{"n_selection_examples": 100, **changes})
        found = choosing.explain_no_choice(settings, run, n_questions, unavailable)
        assert found is not None and why in found
    enough = choosing.MIN_QUESTIONS
    assert choosing.explain_no_choice(spec(n_selection_examples=100), two, enough, None) is None
    published = choosing.publish_trained(two, "no metric")
    assert (published.step, published.path, published.candidates) == (10, ".", ())
    assert published.reason == "the weights that training published: no metric"
    by_loss = choosing.publish_trained(two, "no metric", by_loss=True).reason
    assert "by the lowest held-out loss, so the reported loss is optimistic" in by_loss
    only = choosing.publish_trained(training(0.1, published=10), "no metric", by_loss=True)
    assert only.reason == published.reason


def test_too_few_questions_are_shared() -> None:
    expected = {300: 200, 500: 200, 250: 167, 90: 60, 45: 25, 40: 20, 39: 39, 0: 0}
    settings = spec(max_examples=200, n_selection_examples=100)
    assert {n: choosing.n_to_report(n, settings) for n in expected} == expected
    assert choosing.n_to_report(210, spec(max_examples=200, n_selection_examples=0)) == 200
    assert choosing.n_to_report(45, spec(max_examples=200, n_selection_examples=5)) == 45


def test_missing_weights_are_reported_before_a_model_is_loaded(tmp_path: Path) -> None:
    run = training(0.1, 0.2, published=20)
    for name, file in ((".", "config.json"), ("steps/step-00000010", "adapter_config.json")):
        with pytest.raises(EvaluationError, match="are missing; run train_expert again"):
            choosing.check_weights(run, tmp_path)
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_text("{}")
    choosing.check_weights(run, tmp_path)
