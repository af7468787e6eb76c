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
from expertflow.evaluate import earlier, lm_eval_hook
from expertflow.evaluate.choose_checkpoint import (
    as_trained,
    check_there,
    chosen,
    in_order,
    no_choice,
)
from expertflow.evaluate.comparisons import ModelComparison
from expertflow.evaluate.evaluator import ModelEvaluator, ModelOutcome, Models, Place
from expertflow.evaluate.generate import PromptCodec
from expertflow.evaluate.leakage import check_trained_rows, read_split
from expertflow.evaluate.likelihood import DocumentLosses
from expertflow.evaluate.questions import (
    EvalExample,
    Questions,
    choose_judgeable,
    choose_questions,
)
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

    ``load`` takes a folder of trained weights, or null for the base model.
    ``state`` is the folder of earlier evaluations.
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

    @property
    def expert(self) -> str:
        return self.plan.expert


def evaluate_expert(inputs: EvalInputs) -> EvaluationRecord:
    """Ask the base model, the candidates and the best of them; one is loaded at a time.

    Raises:
        EvaluationError: a held-out document is also in the training data, the records are not of
            one run, or the task cannot be scored as the manifest asks.
    """
    start = time.perf_counter()
    spec, training, expert = inputs.spec, inputs.training, inputs.expert
    check_trained_rows(expert, training=training, packing=inputs.packing, rows=inputs.rows)
    check_there(training, inputs.checkpoint)
    split = read_split(expert, inputs.shards, inputs.keep, packing=inputs.packing, seed=spec.seed)
    evaluator = _evaluator(inputs)
    questions, unusable = _questions(inputs, split.held_out, evaluator)
    asked = questions.reported
    before = _outcome(inputs, evaluator, None, asked)
    harness = [_run_harness(evaluator, None, inputs.tokenizer)]
    published = _published(inputs, evaluator, questions.selection)
    after = _outcome(inputs, evaluator, published.path, asked)
    harness.append(_run_harness(evaluator, published.path, inputs.tokenizer))
    evaluator.models.release()
    comparison = ModelComparison(evaluator, asked, before, after)
    this = _noted(inputs, evaluator, asked, after, published)
    memory = inputs.state / f"{expert}.jsonl"
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
        lm_eval=comparison.harness(*harness),
        decoding=spec.decoding,
        n_held_out_documents=len(split.held_out),
        n_documents_shared_with_training=0,
        n_questions_shared_with_training=split.n_shared_questions,
        n_unusable_references=len(unusable),
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
    return replace(record, unavailable=comparison.unavailable_parts(record, unusable))


def _evaluator(inputs: EvalInputs) -> ModelEvaluator:
    spec = inputs.spec
    task = TASKS.get(spec.task)
    reason = None if task is None else task.unavailable_reason(spec)
    if reason is not None:
        log.warning("%s: nothing is generated: %s", inputs.expert, reason)
    return ModelEvaluator(
        models=Models(inputs.load, inputs.checkpoint),
        spec=spec,
        codec=PromptCodec(Engine(inputs.tokenizer), inputs.layout),
        held_out=read_rows(inputs.rows / "held_out"),
        micro_batch_size=inputs.plan.batch_size,
        task=task,
        unavailable_reason=reason,
    )


def _questions(
    inputs: EvalInputs, held_out: list[Document], evaluator: ModelEvaluator
) -> tuple[Questions, list[str]]:
    """Choose the questions; those whose reference cannot be judged make room for others."""
    spec, layout = inputs.spec, inputs.layout
    if not evaluator.can_answer:
        return Questions([], []), []
    if len(inputs.training.candidates) == 1:
        # There is nothing to choose, so none is kept back for it.
        spec = replace(spec, n_selection_examples=0)
    documents, unusable = choose_judgeable(held_out, spec, layout, evaluator.judge)
    return choose_questions(documents, spec, evaluator.codec.engine, layout), unusable


def _outcome(
    inputs: EvalInputs, evaluator: ModelEvaluator, place: Place, asked: list[EvalExample]
) -> ModelOutcome:
    """Ask one model. Pieces of a single document are no sample of documents: they are one."""
    found = evaluator.outcome(place, asked)
    if inputs.packing.held_out.n_documents != 1:
        return found
    losses = found.losses
    whole = DocumentLosses(losses.nats_D.sum(keepdims=True), losses.n_targets_D.sum(keepdims=True))
    side = replace(found.side, held_out_loss_ci95=None, perplexity_ci95=None, n_documents=1)
    return replace(found, losses=whole, side=side)


def _published(
    inputs: EvalInputs, evaluator: ModelEvaluator, selection: list[EvalExample]
) -> Published:
    training = inputs.training
    why = no_choice(inputs.spec, training, len(selection), evaluator.unavailable_reason)
    if why is not None:
        log.info("%s: no choice among checkpoints: %s", inputs.expert, why)
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


def _run_harness(evaluator: ModelEvaluator, place: Place, tokenizer: Path) -> lm_eval_hook.Figures:
    spec = evaluator.spec.lm_eval
    if spec is None:
        return {}
    if (why := lm_eval_hook.unavailable_reason()) is not None:
        log.warning("evaluation.lm_eval: %s", why)
        return {}
    return lm_eval_hook.measure(
        evaluator.models.get(place), spec, tokenizer=tokenizer, batch_size=evaluator.spec.batch_size
    )


def _noted(
    inputs: EvalInputs,
    evaluator: ModelEvaluator,
    asked: list[EvalExample],
    after: ModelOutcome,
    published: Published,
) -> earlier.Noted | None:
    if evaluator.metric is None or not after.verdicts:
        return None
    spec = inputs.spec
    how = earlier.Asked(
        task=spec.task,
        metric=evaluator.metric,
        max_new_tokens=spec.max_new_tokens,
        decoding=spec.decoding,
        fields=spec.fields,
        artefacts=earlier.hashes_of(spec.artefacts),
    )
    examples = [one.example for one in asked]
    return earlier.noted(how, published.weights_sha256, examples, after.verdicts)
