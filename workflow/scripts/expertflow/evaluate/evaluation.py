"""Score an expert before and after training, on documents that training never saw."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.data.documents import Document
from expertflow.data.records import Layout, ShardRecord
from expertflow.evaluate import earlier
from expertflow.evaluate.choose_checkpoint import (
    as_trained,
    check_there,
    chosen,
    in_order,
    no_choice,
)
from expertflow.evaluate.comparisons import ModelComparison
from expertflow.evaluate.evaluator import ModelEvaluator, Models
from expertflow.evaluate.generate import PromptCodec
from expertflow.evaluate.leakage import check_trained_rows, read_split
from expertflow.evaluate.questions import EvalExample, Questions, choose_questions
from expertflow.evaluate.records import EvaluationRecord, EvaluationSpec, Published
from expertflow.evaluate.statistics import summarise
from expertflow.evaluate.tasks.registry import TASKS
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import TrainingRecord

log = logging.getLogger(__name__)


class EvalInputs(Record, frozen=True, kw_only=True):
    """What is evaluated, and what it is evaluated on.

    ``load`` takes a folder of weights, or null; ``state`` holds earlier evaluations.
    """

    spec: EvaluationSpec
    shards: list[ShardRecord]
    keep: Path
    packing: PackingRecord
    training: TrainingRecord
    rows: Path
    tokenizer: Path
    layout: Layout
    checkpoint: Path
    load: Callable[[Path | None], Any]
    plan: TrainPlan
    state: Path
    answers_path: Path


def evaluate_expert(inputs: EvalInputs) -> EvaluationRecord:
    """Ask the base model, the candidates and the best of them; one is loaded at a time.

    Raises:
        EvaluationError: a held-out document is also in the training data, the records are not of
            one run, or the task cannot be scored as the manifest asks.
    """
    start = time.perf_counter()
    spec, training, expert = inputs.spec, inputs.training, inputs.plan.expert
    check_trained_rows(expert, training=training, packing=inputs.packing, rows=inputs.rows)
    check_there(training, inputs.checkpoint)
    split = read_split(expert, inputs.shards, inputs.keep, packing=inputs.packing, seed=spec.seed)
    evaluator = _evaluator(inputs)
    questions = _questions(inputs, split.held_out, evaluator)
    asked = questions.reported
    before = evaluator.outcome(None, asked)
    published = _published(inputs, evaluator, questions.selection)
    after = evaluator.outcome(published.path, asked)
    evaluator.models.release()
    comparison = ModelComparison(evaluator, asked, before, after)
    memory, this = inputs.state / f"{expert}.jsonl", None
    if evaluator.metric is not None and after.verdicts:
        examples = [one.example for one in asked]
        weights = published.weights_sha256
        this = earlier.noted(spec, evaluator.metric, weights, examples, after.verdicts)
    record = EvaluationRecord(
        expert=expert,
        task=spec.task,
        before=before.side,
        after=after.side,
        changes=comparison.changes(),
        published=published,
        baselines=comparison.baselines(split.training, inputs.layout),
        earlier=None if this is None else earlier.compare(this, memory, seed=spec.seed),
        judge=comparison.judged(),
        lm_eval=comparison.harness(),
        decoding=spec.decoding,
        n_held_out_documents=len(split.held_out),
        n_documents_shared_with_training=0,
        n_questions_shared_with_training=split.n_shared_questions,
        n_unusable_references=len(questions.unusable),
        samples=comparison.samples(),
        worst=comparison.worst(),
        answers_path=str(inputs.answers_path),
        tools=evaluator.tools(),
        unavailable={},
        wall_s=time.perf_counter() - start,
    )
    comparison.write_answers(inputs.answers_path)
    if this is not None:
        earlier.note(this, memory)
    return replace(record, unavailable=comparison.unavailable_parts(record, questions.unusable))


def _evaluator(inputs: EvalInputs) -> ModelEvaluator:
    spec = inputs.spec
    task = TASKS.get(spec.task)
    reason = None if task is None else task.unavailable_reason(spec)
    if reason is not None:
        log.warning("%s: nothing is generated: %s", inputs.plan.expert, reason)
    return ModelEvaluator(
        models=Models(inputs.load, inputs.checkpoint),
        spec=spec,
        tokenizer=inputs.tokenizer,
        codec=PromptCodec(Engine(inputs.tokenizer), inputs.layout),
        held_out=read_rows(inputs.rows / "held_out"),
        micro_batch_size=inputs.plan.batch_size,
        is_one_document=inputs.packing.held_out.n_documents == 1,
        task=task,
        unavailable_reason=reason,
    )


def _questions(
    inputs: EvalInputs, held_out: list[Document], evaluator: ModelEvaluator
) -> Questions:
    spec = inputs.spec
    if not evaluator.can_answer:
        return Questions([], [], [])
    if len(inputs.training.candidates) == 1:
        # There is nothing to choose, so none is kept back for it.
        spec = replace(spec, n_selection_examples=0)
    engine = evaluator.codec.engine
    return choose_questions(held_out, spec, engine, inputs.layout, evaluator.judge)


def _published(
    inputs: EvalInputs, evaluator: ModelEvaluator, selection: list[EvalExample]
) -> Published:
    training = inputs.training
    why = no_choice(inputs.spec, training, len(selection), evaluator.unavailable_reason)
    if why is not None:
        log.info("%s: no choice among checkpoints: %s", inputs.plan.expert, why)
        return as_trained(training, why, by_loss=inputs.plan.load_best_model_at_end)
    scores = []
    # Training and this measure in other batches: losses of one table are of one measurement.
    all_measured = all(one.held_out_loss is not None for one in training.candidates)
    for candidate in in_order(training):
        assert evaluator.metric is not None, "a choice without a metric"
        if not all_measured:
            # Training measures at its own steps; the weights were loaded anyway.
            loss = evaluator.held_out_loss(candidate.path)
            candidate = replace(candidate, held_out_loss=loss)
        verdicts = evaluator.answers(candidate.path, selection).verdicts
        scores.append((candidate, summarise(evaluator.metric, verdicts)))
        log.info("step %d: %d of %d", candidate.step, scores[-1][1].n_correct, len(selection))
    return chosen(training, scores, len(selection))
