"""Choose among the kept checkpoints by the task's own metric. Pure.

The choice uses questions that are not reported, since the best of several looks better than it is
on the questions it was chosen on. The held-out loss has no second set: if it decides, or
training chose by it, the reported loss is biased by the choice.
"""

from collections.abc import Sequence
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.core.records import fill_record
from expertflow.evaluate.records import (
    HELD_OUT_LOSS,
    CandidateScore,
    GenerationSpec,
    Published,
    TaskScore,
)
from expertflow.train.records import KeptWeights, TrainingRecord

# With fewer, a score's interval is 40 points wide and the choice would be random.
MIN_QUESTIONS = 20
# With fewer questions in all, none are withheld from the report.
MIN_TO_SHARE = 40
CHOSEN_BY_LOSS = (
    "training chose them by the lowest held-out loss, so the reported loss is optimistic"
)


def explain_no_choice(
    spec: GenerationSpec, training: TrainingRecord, n_questions: int, unavailable_reason: str | None
) -> str | None:
    if spec.task == HELD_OUT_LOSS:
        return "the task has no metric besides the held-out loss"
    if unavailable_reason is not None:
        return f"the task cannot be scored here: {unavailable_reason}"
    if len(training.candidates) == 1:
        return "training kept no other checkpoint"
    if spec.n_selection_examples < MIN_QUESTIONS:
        n = spec.n_selection_examples
        return f"evaluation.n_selection_examples is {n}, and {MIN_QUESTIONS} are needed to choose"
    if n_questions < MIN_QUESTIONS:
        return f"{n_questions} held-out questions are left to choose by, {MIN_QUESTIONS} are needed"
    return None


def n_to_report(n_questions: int, spec: GenerationSpec) -> int:
    """Return how many questions to report; if too few for both, a third (or 20) choose."""
    n_most = min(n_questions, spec.max_examples)
    n_wanted = spec.max_examples + spec.n_selection_examples
    is_enough = spec.n_selection_examples >= MIN_QUESTIONS
    if n_questions >= n_wanted or n_questions < MIN_TO_SHARE or not is_enough:
        return n_most
    # Of 60 questions 20 choose and 40 are reported.
    n_choice = min(max(n_questions // 3, MIN_QUESTIONS), spec.n_selection_examples)
    return min(n_most, n_questions - n_choice)


def publish_trained(training: TrainingRecord, why: str, *, by_loss: bool = False) -> Published:
    """Publish what training published; ``by_loss``: it takes the step of the lowest loss."""
    reason = f"the weights that training published: {why}"
    # Of a single evaluation nothing is chosen; the one at step 0 is of the untrained model.
    if by_loss and sum(point.step > 0 for point in training.eval_points) > 1:
        reason += f"; {CHOSEN_BY_LOSS}"
    return fill_record(Published, order_candidates(training)[-1], reason=reason)


def order_candidates(training: TrainingRecord) -> list[KeptWeights]:
    """Return the candidates with training's choice last, so that it is still loaded afterwards."""
    return sorted(training.candidates, key=lambda one: one.step == training.published_step)


def choose_best(scores: Sequence[tuple[KeptWeights, TaskScore]], n_questions: int) -> Published:
    """Publish the best score; ties go to the lowest held-out loss, then the latest step."""
    # By now each has a loss.
    best, score = max(
        scores, key=lambda one: (one[1].n_correct, -(one[0].held_out_loss or 0.0), one[0].step)
    )
    candidates = tuple(
        fill_record(CandidateScore, one, score=own, published=one == best)
        for one, own in sorted(scores, key=lambda pair: pair[0].step)
    )
    reason = (
        f"step {best.step} has the best {score.metric} of {len(scores)} kept checkpoints,"
        f" {score.n_correct} of {score.n_examples} selection questions"
    )
    n_others = sum(other.n_correct == score.n_correct for _, other in scores) - 1
    if n_others:
        others = "another" if n_others == 1 else f"{n_others} others"
        reason += f", tied with {others}; the lowest held-out loss decides, then the latest step"
    return fill_record(
        Published, best, reason=reason, n_questions=n_questions, candidates=candidates
    )


def check_weights(training: TrainingRecord, checkpoint: Path) -> None:
    for candidate in training.candidates:
        folder = checkpoint / candidate.path
        names = ("config.json", "adapter_config.json")
        if not any((folder / name).is_file() for name in names):
            raise EvaluationError(
                f"{folder}: the weights after step {candidate.step} are"
                " missing; run train_expert again, which restores them from its state"
            )
