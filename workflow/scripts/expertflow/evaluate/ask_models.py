"""Ask the base model, the candidates and the best of them: the part that needs a card.

Their answers are scored by ``evaluation``, except if a score chooses among checkpoints.
"""

import logging
import time
from collections.abc import Iterator

from msgspec.structs import replace

from expertflow.data.documents import Document, iter_kept, make_ids_unique
from expertflow.evaluate import lm_eval_hook
from expertflow.evaluate.choose_checkpoint import (
    check_weights,
    choose_best,
    explain_no_choice,
    order_candidates,
    publish_trained,
)
from expertflow.evaluate.evaluator import GenerationInputs, ModelEvaluator
from expertflow.evaluate.leakage import check_trained_rows
from expertflow.evaluate.questions import EvalExample, Questions, choose_questions
from expertflow.evaluate.recall import choose_recall, list_wordings, reword
from expertflow.evaluate.records import GenerationRecord, Published, RecallAnswers
from expertflow.evaluate.scoring import judge_answers
from expertflow.evaluate.statistics import summarize_judgments

log = logging.getLogger(__name__)


def ask_models(inputs: GenerationInputs) -> GenerationRecord:
    """Ask all models the same questions, loading one at a time.

    Raises EvaluationError if the records are from different runs, or the task cannot be scored as
    configured.
    """
    start = time.perf_counter()
    spec, training, expert = inputs.spec, inputs.training, inputs.plan.expert
    check_trained_rows(expert, training=training, packing=inputs.packing, rows=inputs.rows)
    check_weights(training, inputs.checkpoint)
    held_out = make_ids_unique(iter_kept(inputs.shards, inputs.keep, held_out=True))
    evaluator = ModelEvaluator(inputs)
    questions = _questions(inputs, held_out, evaluator)
    asked = questions.reported
    # Chosen before a model is run, like the others: too many bad references are an error.
    trained = list(_questions_on_training(inputs, evaluator))
    before, figures_before = evaluator.ask_model(None, asked), evaluator.run_harness(None)
    # All questions to the base model come first, so that it is loaded once.
    published = _published(inputs, evaluator, questions.selection)
    after = evaluator.ask_model(published.path, asked)
    recall = tuple(
        RecallAnswers(
            wording=wording,
            document_ids=tuple(one.example.document_id for one in reworded),
            answers=evaluator.answer_questions(published.path, reworded),
        )
        for wording, reworded in trained
    )
    figures_after = evaluator.run_harness(published.path)
    why_no_harness = lm_eval_hook.unavailable_reason()
    if spec.lm_eval is None:
        why_no_harness = "evaluation.lm_eval is not set"
    elif why_no_harness is not None:
        log.warning("evaluation.lm_eval: %s", why_no_harness)
    return GenerationRecord(
        expert=expert,
        spec=spec,
        document_ids=tuple(one.example.document_id for one in asked),
        unusable=tuple(questions.unusable),
        unavailable_reason=evaluator.unavailable_reason,
        published=published,
        before=before,
        after=after,
        lm_eval=tuple(lm_eval_hook.pair_scores(figures_before, figures_after)),
        lm_eval_unavailable=why_no_harness,
        wall_s=time.perf_counter() - start,
        recall=recall,
    )


def _questions_on_training(
    inputs: GenerationInputs, evaluator: ModelEvaluator
) -> Iterator[tuple[str, list[EvalExample]]]:
    """Yield each wording with the questions on what was trained."""
    n_asked, task = inputs.spec.n_recall_examples, evaluator.task
    if task is None or not n_asked:
        return
    spec = replace(inputs.spec, max_examples=n_asked, n_selection_examples=0)
    documents = choose_recall(inputs.shards, inputs.keep, spec)
    for wording in list_wordings(spec):
        reworded = [reword(document, wording) for document in documents]
        engine = evaluator.codec.engine
        chosen = choose_questions(reworded, spec, task, engine=engine, layout=inputs.layout)
        yield wording, chosen.reported


def _questions(
    inputs: GenerationInputs, held_out: list[Document], evaluator: ModelEvaluator
) -> Questions:
    if evaluator.task is None:
        return Questions([], [], [])
    spec = inputs.spec
    if len(inputs.training.candidates) == 1:
        # Nothing to choose, so no questions are withheld.
        spec = replace(spec, n_selection_examples=0)
    return choose_questions(
        held_out, spec, evaluator.task, engine=evaluator.codec.engine, layout=inputs.layout
    )


def _published(
    inputs: GenerationInputs, evaluator: ModelEvaluator, selection: list[EvalExample]
) -> Published:
    training, expert = inputs.training, inputs.plan.expert
    why = explain_no_choice(inputs.spec, training, len(selection), evaluator.unavailable_reason)
    if why is not None:
        log.info("%s: no choice among checkpoints: %s", expert, why)
        return publish_trained(training, why, by_loss=inputs.plan.load_best_model_at_end)
    scores = []
    # Training measures with other batches, so a table must not mix its losses with these.
    all_measured = all(one.held_out_loss is not None for one in training.candidates)
    for candidate in order_candidates(training):
        assert evaluator.task is not None, "a choice without a task"
        if not all_measured:
            # Training measured at other steps, and the weights are loaded anyway.
            losses = evaluator.measure_losses(candidate.path)
            mean = float(losses.nats_D.sum() / losses.n_targets_D.sum())
            candidate = replace(candidate, held_out_loss=mean)
        answers = evaluator.answer_questions(candidate.path, selection)
        # Scored while the model is loaded: what is asked next depends on it.
        judgments = judge_answers(evaluator.task, [one.example for one in selection], answers)
        scores.append((candidate, summarize_judgments(evaluator.task.metric, judgments)))
        log.info("step %d: %d of %d", candidate.step, scores[-1][1].n_correct, len(selection))
    return choose_best(scores, len(selection))
