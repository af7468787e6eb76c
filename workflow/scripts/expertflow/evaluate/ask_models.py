"""Ask the base model, the candidates and the best of them: the part that needs a card.

Their answers are scored by ``evaluation``, except if a score chooses among checkpoints.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.documents import Document, iter_kept, make_ids_unique
from expertflow.data.records import Layout, ShardRecord
from expertflow.evaluate import generate, lm_eval_hook, lm_eval_tasks
from expertflow.evaluate.choose_checkpoint import (
    check_weights,
    choose_best,
    explain_no_choice,
    order_candidates,
    publish_trained,
)
from expertflow.evaluate.leakage import check_trained_rows
from expertflow.evaluate.likelihood import (
    DocumentLosses,
    choose_options,
    document_losses,
    log_likelihoods,
)
from expertflow.evaluate.questions import EvalExample, Questions, choose_questions, iter_recall
from expertflow.evaluate.records import (
    GenerationRecord,
    GenerationSpec,
    ModelAnswers,
    Published,
    RecallAnswers,
)
from expertflow.evaluate.scoring import judge_answers, make_task
from expertflow.evaluate.statistics import summarize_judgments
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import DOCUMENTS_FILE, read_rows
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import TrainingRecord

log = logging.getLogger(__name__)
# Path relative to the checkpoint's folder; null is the base model.
Place = str | None


class GenerationInputs(Record, frozen=True, kw_only=True):
    """``load`` takes a folder of weights or null."""

    spec: GenerationSpec
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
    # With nothing to choose, no questions are withheld.
    n_selection = spec.n_selection_examples if len(training.candidates) > 1 else 0
    questions = evaluator.choose_questions(held_out, n_selection_examples=n_selection)
    asked = questions.reported
    # Chosen before a model is run, like the others: too many bad references are an error.
    trained = list(evaluator.choose_trained())
    before, figures_before = evaluator.ask_model(None, asked), evaluator.run_harness(None)
    # All questions to the base model come first, so that it is loaded once.
    published = evaluator.choose_checkpoint(questions.selection)
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
        lm_eval_unavailable=evaluator.why_no_harness,
        wall_s=time.perf_counter() - start,
        recall=recall,
    )


class ModelEvaluator:
    """Asks the base model (null) and the candidates, one at a time.

    ``task`` is null if nothing is scored; ``unavailable_reason`` is why, if it has a metric.
    """

    def __init__(self, inputs: GenerationInputs) -> None:
        self.spec, self._inputs = inputs.spec, inputs
        self.codec = generate.PromptCodec(Engine(inputs.tokenizer), inputs.layout)
        self.task = make_task(self.spec)
        self.unavailable_reason = None if self.task is None else self.task.unavailable_reason()
        if (why := self.unavailable_reason) is not None:
            log.warning("%s: nothing is generated: %s", inputs.plan.expert, why)
            self.task = None
        self.why_no_harness = lm_eval_tasks.unavailable_reason()
        if self.spec.lm_eval is None:
            self.why_no_harness = "evaluation.lm_eval is not set"
        elif self.why_no_harness is not None:
            log.warning("evaluation.lm_eval: %s", self.why_no_harness)
        self._held_out = read_rows(inputs.rows / "held_out")
        self._loaded: tuple[Place, Any] | None = None
        self._losses: dict[Place, DocumentLosses] = {}

    def choose_questions(self, documents: Iterable[Document], **changes: int) -> Questions:
        if self.task is None:
            return Questions([], [], [])
        spec, engine, layout = replace(self.spec, **changes), self.codec.engine, self.codec.layout
        return choose_questions(documents, spec, self.task, engine=engine, layout=layout)

    def choose_trained(self) -> Iterator[tuple[str, list[EvalExample]]]:
        if self.task is not None:
            stored, codec = (self._inputs.shards, self._inputs.keep), self.codec
            yield from iter_recall(
                *stored, self.spec, self.task, engine=codec.engine, layout=codec.layout
            )

    def choose_checkpoint(self, selection: list[EvalExample]) -> Published:
        training, plan = self._inputs.training, self._inputs.plan
        why = explain_no_choice(self.spec, training, len(selection), self.unavailable_reason)
        if why is not None:
            log.info("%s: no choice among checkpoints: %s", plan.expert, why)
            return publish_trained(training, why, by_loss=plan.load_best_model_at_end)
        assert self.task is not None, "a choice without a task"
        scores = []
        # Training measures with other batches, so a table must not mix its losses with these.
        all_measured = all(one.held_out_loss is not None for one in training.candidates)
        for candidate in order_candidates(training):
            if not all_measured:
                # Training measured at other steps, and the weights are loaded anyway.
                losses = self.measure_losses(candidate.path)
                mean = float(losses.nats_D.sum() / losses.n_targets_D.sum())
                candidate = replace(candidate, held_out_loss=mean)
            answers = self.answer_questions(candidate.path, selection)
            # Scored while the model is loaded: what is asked next depends on it.
            judgments = judge_answers(self.task, [one.example for one in selection], answers)
            scores.append((candidate, summarize_judgments(self.task.metric, judgments)))
            log.info("step %d: %d of %d", candidate.step, scores[-1][1].n_correct, len(selection))
        return choose_best(scores, len(selection))

    def load_model(self, place: Place) -> Any:
        """Return a model, which callers must not keep: two may not fit into memory."""
        if self._loaded is None or self._loaded[0] != place:
            self._loaded = None
            gc.collect()
            torch.cuda.empty_cache()
            folder = None if place is None else self._inputs.checkpoint / place
            log.info("loading %s", folder or "the base model")
            self._loaded = place, self._inputs.load(folder)
        return self._loaded[1]

    def measure_losses(self, place: Place) -> DocumentLosses:
        if place not in self._losses:
            batch_size = self._inputs.plan.batch_size
            losses = document_losses(
                self.load_model(place), self._held_out, micro_batch_size=batch_size
            )
            if not np.isfinite(losses.nats_D).all():
                who = "the base model" if place is None else "the trained model"
                raise EvaluationError(
                    f"{who}'s held-out loss is not finite in {self._inputs.plan.precision}; use"
                    " another precision or another model"
                )
            of_pieces = self._inputs.rows / "held_out" / DOCUMENTS_FILE
            if of_pieces.is_file():
                # In the documents' order, as their groups; pieces of one are not independent.
                document_P = np.load(of_pieces)
                losses = DocumentLosses(
                    # Sum pieces [P] into documents [D].
                    np.bincount(document_P, losses.nats_D).astype(np.float64),
                    np.bincount(document_P, losses.n_targets_D).astype(np.int64),
                )
            self._losses[place] = losses
        return self._losses[place]

    def ask_model(self, place: Place, asked: list[EvalExample]) -> ModelAnswers:
        losses = self.measure_losses(place)
        log.info("%d questions", len(asked))
        likelihoods = log_likelihoods(
            self.load_model(place),
            [one.reference for one in asked],
            pad_id=self.codec.pad_id,
            batch_size=self.spec.batch_size,
        )
        found = self.answer_questions(place, asked) if asked else ModelAnswers()
        return replace(
            found,
            nats=tuple(losses.nats_D.tolist()),
            n_targets=tuple(losses.n_targets_D.tolist()),
            reference_losses=tuple(
                -nats / n if isfinite(nats) else None for nats, n in likelihoods
            ),
        )

    def run_harness(self, place: Place) -> lm_eval_hook.Figures:
        spec, size, tokenizer = self.spec.lm_eval, self.spec.batch_size, self._inputs.tokenizer
        if spec is None or self.why_no_harness is not None:
            return {}
        model = self.load_model(place)
        return lm_eval_hook.run_tasks(model, spec, tokenizer=tokenizer, batch_size=size)

    def answer_questions(self, place: Place, asked: Sequence[EvalExample]) -> ModelAnswers:
        """Generate a model's answers, or choose them."""
        assert self.task is not None, "a task without a scorer"
        model, generates = self.load_model(place), not self.task.is_choice
        if generates:
            prompts = [one.prompt_ids for one in asked]
            found = generate.generate_answers(model, prompts, self.codec, self.spec)
        else:
            found = choose_options(
                model, asked, pad_id=self.codec.pad_id, batch_size=self.spec.batch_size
            )
        cut_off = [not answer.ended for answer in found if answer.not_asked is None]
        return ModelAnswers(
            texts=tuple(answer.text for answer in found),
            not_asked={
                one.example.document_id: answer.not_asked
                for one, answer in zip(asked, found, strict=True)
                if answer.not_asked is not None
            },
            n_cut_off=sum(cut_off) if generates else None,
        )
