"""Ask several models the same things in turn: held-out documents and the task's questions."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.records import Layout, ShardRecord
from expertflow.evaluate import generate, lm_eval_hook
from expertflow.evaluate.likelihood import (
    DocumentLosses,
    choose_options,
    document_losses,
    log_likelihoods,
)
from expertflow.evaluate.questions import EvalExample
from expertflow.evaluate.records import GenerationSpec, ModelAnswers
from expertflow.evaluate.scoring import make_task
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


class Models:
    """The base model (null) and the candidates, one at a time; callers must not keep references."""

    def __init__(self, load: Callable[[Path | None], Any], checkpoint: Path) -> None:
        self._load = load
        self._checkpoint = checkpoint
        self._loaded: tuple[Place, Any] | None = None

    def get(self, place: Place) -> Any:
        if self._loaded is None or self._loaded[0] != place:
            # Release first: two models may not fit into memory.
            self.release()
            folder = None if place is None else self._checkpoint / place
            log.info("loading %s", folder or "the base model")
            self._loaded = place, self._load(folder)
        return self._loaded[1]

    def release(self) -> None:
        self._loaded = None
        gc.collect()
        torch.cuda.empty_cache()


class ModelEvaluator:
    """``task`` is null if nothing is scored; ``unavailable_reason`` is why, if it has a metric."""

    def __init__(self, inputs: GenerationInputs) -> None:
        self.spec, self._inputs = inputs.spec, inputs
        self.models = Models(inputs.load, inputs.checkpoint)
        self.codec = generate.PromptCodec(Engine(inputs.tokenizer), inputs.layout)
        self.task = make_task(self.spec)
        self.unavailable_reason = None if self.task is None else self.task.unavailable_reason()
        if (why := self.unavailable_reason) is not None:
            log.warning("%s: nothing is generated: %s", inputs.plan.expert, why)
            self.task = None
        self._held_out = read_rows(inputs.rows / "held_out")
        self._losses: dict[Place, DocumentLosses] = {}

    def measure_losses(self, place: Place) -> DocumentLosses:
        if place not in self._losses:
            batch_size = self._inputs.plan.batch_size
            losses = document_losses(
                self.models.get(place), self._held_out, micro_batch_size=batch_size
            )
            if not np.isfinite(losses.nats_D).all():
                who = "the base model" if place is None else "the trained model"
                raise EvaluationError(
                    f"{who}'s held-out loss is not finite in {self._inputs.plan.precision}; use"
                    " another precision or another model"
                )
            of_pieces = self._inputs.rows / "held_out" / DOCUMENTS_FILE
            if of_pieces.is_file():
                # Pieces of one document are not independent measurements.
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
            self.models.get(place),
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
        spec = self.spec.lm_eval
        if spec is None or lm_eval_hook.unavailable_reason() is not None:
            return {}
        model, tokenizer = self.models.get(place), self._inputs.tokenizer
        batch_size = self.spec.batch_size
        return lm_eval_hook.run_tasks(model, spec, tokenizer=tokenizer, batch_size=batch_size)

    def answer_questions(self, place: Place, asked: Sequence[EvalExample]) -> ModelAnswers:
        """Generate a model's answers, or choose them; loading the model is not timed."""
        assert self.task is not None, "a task without a scorer"
        model, generates = self.models.get(place), not self.task.is_choice
        start = time.perf_counter()
        if generates:
            prompts = [one.prompt_ids for one in asked]
            found = generate.generate_answers(model, prompts, self.codec, self.spec)
        else:
            found = choose_options(
                model, asked, pad_id=self.codec.pad_id, batch_size=self.spec.batch_size
            )
        duration_s = time.perf_counter() - start
        cut_off = [not answer.ended for answer in found if answer.not_asked is None]
        return ModelAnswers(
            texts=tuple(answer.text for answer in found),
            not_asked={
                one.example.document_id: answer.not_asked
                for one, answer in zip(asked, found, strict=True)
                if answer.not_asked is not None
            },
            generation_s=duration_s,
            n_generated_tokens=sum(answer.n_tokens for answer in found) if generates else None,
            n_cut_off=sum(cut_off) if generates else None,
        )
