"""Score an expert before and after training, on documents that training never saw."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertflow.data.records import Layout, ShardRecord
from expertflow.evaluate import earlier
from expertflow.evaluate.answers import samples, worst, write_answers
from expertflow.evaluate.ask import Held, Questions, choose
from expertflow.evaluate.choose_checkpoint import (
    as_trained,
    check_there,
    chosen,
    in_order,
    no_choice,
)
from expertflow.evaluate.expert_extras import Extras, changes, gaps, run_harness
from expertflow.evaluate.expert_models import Models, Place
from expertflow.evaluate.expert_sides import (
    Asker,
    Outcome,
    Speaker,
    metric_or_none,
)
from expertflow.evaluate.losses import DocumentLosses
from expertflow.evaluate.records import (
    EvaluationRecord,
    EvaluationSpec,
    Published,
)
from expertflow.evaluate.references import Judgeable, judgeable
from expertflow.evaluate.scores import summarise
from expertflow.evaluate.tasks import hindrance, tools
from expertflow.evaluate.unseen import Unseen, check_trained_rows, read_unseen
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import TrainingRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
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
        """Give the expert's name."""
        return self.plan.expert


def evaluate_expert(case: Case) -> EvaluationRecord:
    """Ask the base model, the candidates and the best of them; one is loaded at a time.

    Raises:
        EvaluationError: a held-out document is also in the training data, the records are not of
            one run, or the task cannot be scored as the manifest asks.
    """
    start = time.perf_counter()
    spec, training = case.spec, case.training
    check_trained_rows(case.expert, training=training, packing=case.packing, rows=case.rows)
    check_there(training, case.checkpoint)
    unseen = read_unseen(case.expert, case.shards, case.keep, packing=case.packing, seed=spec.seed)
    asker = _asker(case)
    usable, questions = _questions(case, unseen, asker)
    before = _outcome(case, asker, None, questions.reported)
    harness = [run_harness(asker, None, case.tokenizer)]
    published = _published(case, asker, questions.selection)
    after = _outcome(case, asker, published.path, questions.reported)
    harness.append(run_harness(asker, published.path, case.tokenizer))
    asker.models.release()
    extras = Extras(asker, questions.reported, before, after)
    this = _noted(case, asker, questions.reported, after, published)
    memory = case.state / f"{case.expert}.jsonl"
    record = EvaluationRecord(
        expert=case.expert,
        task=spec.task,
        before=before.side,
        after=after.side,
        changes=changes(asker, before, after),
        published=published,
        baselines=extras.baselines(unseen.training, case.layout),
        earlier=None if this is None else earlier.compare(this, memory, seed=spec.seed),
        judge=extras.judged(),
        lm_eval=extras.harness(*harness),
        decoding=spec.decoding,
        n_held_out_documents=len(unseen.held_out),
        n_documents_shared_with_training=0,
        n_questions_shared_with_training=unseen.n_shared_questions,
        n_unusable_references=usable.n_unusable,
        samples=samples(questions.reported, before, after),
        worst=worst(questions.reported, before, after),
        answers_path=str(case.answers_path),
        tools=tools(spec) if asker.can_answer else {},
        unavailable={},
        wall_s=time.perf_counter() - start,
    )
    write_answers(case.answers_path, questions.reported, before, after)
    if this is not None:
        earlier.note(this, memory)
    return replace(record, unavailable=extras.unavailable | gaps(record, asker, usable.reason))


def _asker(case: Case) -> Asker:
    spec, metric = case.spec, metric_or_none(case.spec)
    hindered = None if metric is None else hindrance(spec)
    if hindered is not None:
        log.warning("%s: nothing is generated: %s", case.expert, hindered)
    return Asker(
        models=Models(case.load, case.checkpoint),
        spec=spec,
        speaker=Speaker(Engine(case.tokenizer), case.layout),
        held_out=read_rows(case.rows / "held_out"),
        micro_batch_size=case.plan.micro_batch_size,
        metric=metric,
        hindrance=hindered,
    )


def _questions(case: Case, unseen: Unseen, asker: Asker) -> tuple[Judgeable, Questions]:
    """Choose the questions; those whose reference cannot be judged make room for others."""
    spec = case.spec
    if not asker.can_answer:
        return Judgeable(documents=[], n_unusable=0, reason=None), Questions([], [])
    if len(case.training.candidates) == 1:
        # There is nothing to choose, so none is kept back for it.
        spec = replace(spec, n_selection_examples=0)
    usable = judgeable(unseen.held_out, spec, case.layout, asker.judge)
    return usable, choose(usable.documents, spec, asker.speaker.engine, case.layout)


def _outcome(case: Case, asker: Asker, place: Place, asked: list[Held]) -> Outcome:
    """Ask one model. Pieces of a single document are no sample of documents: they are one."""
    found = asker.outcome(place, asked)
    if case.packing.held_out.n_documents != 1:
        return found
    losses = found.losses
    whole = DocumentLosses(losses.nats_D.sum(keepdims=True), losses.n_targets_D.sum(keepdims=True))
    side = replace(found.side, held_out_loss_ci95=None, perplexity_ci95=None, n_documents=1)
    return replace(found, losses=whole, side=side)


def _published(case: Case, asker: Asker, selection: list[Held]) -> Published:
    """Let the candidates answer the questions of the choice, where there is one."""
    training = case.training
    why = no_choice(case.spec, training, len(selection), asker.hindrance)
    if why is not None:
        log.info("%s: no choice among checkpoints: %s", case.expert, why)
        return as_trained(training, why, by_loss=case.plan.load_best_model_at_end)
    scores = []
    # Training and this measure in other batches: losses of one table are of one measurement.
    all_measured = all(one.held_out_loss is not None for one in training.candidates)
    for candidate in in_order(training):
        assert asker.metric is not None, "a choice without a metric"
        if not all_measured:
            # Training measures at its own steps; the weights were loaded anyway.
            loss = asker.held_out_loss(candidate.path)
            candidate = replace(candidate, held_out_loss=loss)
        verdicts = asker.said(candidate.path, selection).verdicts
        scores.append((candidate, summarise(asker.metric, verdicts)))
        log.info("step %d: %d of %d", candidate.step, scores[-1][1].n_correct, len(selection))
    return chosen(training, scores, len(selection))


def _noted(
    case: Case, asker: Asker, asked: list[Held], after: Outcome, published: Published
) -> earlier.Noted | None:
    """Sum up what later evaluations are compared with; null where no answers were asked for."""
    if asker.metric is None or not after.verdicts:
        return None
    how = earlier.Asked(
        task=case.spec.task,
        metric=asker.metric,
        max_new_tokens=case.spec.max_new_tokens,
        decoding=case.spec.decoding,
        fields=case.spec.fields,
        artefacts=earlier.hashes_of(case.spec.artefacts),
    )
    examples = [held.example for held in asked]
    return earlier.noted(how, published.weights_sha256, examples, after.verdicts)
