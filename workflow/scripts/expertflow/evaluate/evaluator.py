"""Ask several models the same things in turn: held-out documents and the task's questions."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from math import exp, isfinite
from pathlib import Path
from typing import Any

import torch
from msgspec import field
from msgspec.structs import asdict

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
from expertflow.evaluate.records import EvaluationSide, EvaluationSpec, Judgment
from expertflow.evaluate.scoring import make_task, own_digest
from expertflow.evaluate.statistics import NO_EXAMPLES, mean_interval, summarize_judgments
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import TrainingRecord

log = logging.getLogger(__name__)
# exp() of more overflows.
LARGEST_LOSS = 700.0
# Path below the checkpoint's folder; null is the base model.
Place = str | None


class EvalInputs(Record, frozen=True, kw_only=True):
    """``load`` takes a folder of weights or null; ``state`` holds earlier evaluations."""

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


class Models:
    """The base model (null) and the candidates, one at a time; callers must not keep references."""

    def __init__(self, load: Callable[[Path | None], Any], checkpoint: Path) -> None:
        self._load = load
        self._checkpoint = checkpoint
        self._loaded: tuple[Place, Any] | None = None

    def get(self, place: Place) -> Any:
        if self._loaded is None or self._loaded[0] != place:
            self.release()
            folder = None if place is None else self._checkpoint / place
            log.info("loading %s", folder or "the base model")
            self._loaded = place, self._load(folder)
        return self._loaded[1]

    def release(self) -> None:
        if self._loaded is None:
            return
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Generations(Record, frozen=True, kw_only=True):
    """A model's answers; tokens are counted only for generated answers to questions asked."""

    texts: list[str] = field(default_factory=list)
    judgments: list[Judgment] = field(default_factory=list)
    duration_s: float | None = None
    n_tokens: int | None = None
    n_cut_off: int | None = None


class ModelOutcome(Generations, frozen=True, kw_only=True):
    """One model's results; ``reference_losses`` are nats a token on each question's reference."""

    side: EvaluationSide
    losses: DocumentLosses
    reference_losses: list[float | None]
    harness: lm_eval_hook.Figures


class ModelEvaluator:
    """``task`` is null if nothing is scored; ``unavailable_reason`` is why, if it has a metric."""

    def __init__(self, inputs: EvalInputs) -> None:
        self.spec, self._inputs = inputs.spec, inputs
        self.models = Models(inputs.load, inputs.checkpoint)
        self.codec = generate.PromptCodec(Engine(inputs.tokenizer), inputs.layout)
        self.task = make_task(self.spec)
        self.metric = self.unavailable_reason = None
        if self.task is not None:
            self.metric = self.task.metric
            self.unavailable_reason = self.task.unavailable_reason()
        if (why := self.unavailable_reason) is not None:
            log.warning("%s: nothing is generated: %s", inputs.plan.expert, why)
            self.task = None
        self._held_out = read_rows(inputs.rows / "held_out")
        self._losses: dict[Place, DocumentLosses] = {}

    def tool_versions(self) -> dict[str, str]:
        digest = own_digest(self.spec)
        own = {} if digest is None else {self.spec.task_name: f"sha256:{digest}"}
        return {**self.task.tool_versions(), **own} if self.task else own

    def measure_losses(self, place: Place) -> DocumentLosses:
        if place not in self._losses:
            batch_size = self._inputs.plan.batch_size
            losses = document_losses(
                self.models.get(place), self._held_out, micro_batch_size=batch_size
            )
            if self._inputs.packing.held_out.n_documents == 1:
                # All held-out rows are pieces of a single document.
                losses = DocumentLosses(
                    losses.nats_D.sum(keepdims=True), losses.n_targets_D.sum(keepdims=True)
                )
            self._losses[place] = losses
        return self._losses[place]

    def mean_loss(self, place: Place) -> float:
        """Return the mean loss in nats a target."""
        losses = self.measure_losses(place)
        return float(losses.nats_D.sum() / losses.n_targets_D.sum())

    def evaluate_model(self, place: Place, asked: list[EvalExample]) -> ModelOutcome:
        losses = self.measure_losses(place)
        log.info("%d questions", len(asked))
        asked = asked if self.task else []
        likelihoods = log_likelihoods(
            self.models.get(place),
            [one.reference for one in asked],
            pad_id=self.codec.pad_id,
            batch_size=self.spec.batch_size,
        )
        found = self.answer_questions(place, asked) if asked else Generations()
        score = None
        if self.metric is not None:
            score = summarize_judgments(
                self.metric, found.judgments, self.unavailable_reason or NO_EXAMPLES
            )
        loss = self.mean_loss(place)
        ci95 = mean_interval(losses.nats_D, losses.n_targets_D, self.spec.seed)
        side = EvaluationSide(
            held_out_loss=loss,
            held_out_loss_ci95=ci95,
            perplexity=_perplexity(loss),
            perplexity_ci95=None if ci95 is None else (_perplexity(ci95[0]), _perplexity(ci95[1])),
            n_target_tokens=int(losses.n_targets_D.sum()),
            n_documents=int((losses.n_targets_D > 0).sum()),
            score=score,
            generation_s=found.duration_s,
            n_generated_tokens=found.n_tokens,
            n_cut_off=found.n_cut_off,
        )
        return ModelOutcome(
            **asdict(found),
            side=side,
            losses=losses,
            # Null if the reference exceeds the model's positions.
            reference_losses=[-nats / n if isfinite(nats) else None for nats, n in likelihoods],
            harness=self._run_harness(place),
        )

    def _run_harness(self, place: Place) -> lm_eval_hook.Figures:
        spec = self.spec.lm_eval
        if spec is None:
            return {}
        if (why := lm_eval_hook.unavailable_reason()) is not None:
            log.warning("evaluation.lm_eval: %s", why)
            return {}
        model, tokenizer = self.models.get(place), self._inputs.tokenizer
        batch_size = self.spec.batch_size
        return lm_eval_hook.run_tasks(model, spec, tokenizer=tokenizer, batch_size=batch_size)

    def answer_questions(self, place: Place, asked: Sequence[EvalExample]) -> Generations:
        """Generate and judge a model's answers; loading the model is not timed."""
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
        texts = [answer.text for answer in found]
        judgments = self.task.score([one.example for one in asked], texts)
        for i, answer in enumerate(found):
            if answer.not_asked is not None:
                judgments[i] = Judgment("not_asked", answer.not_asked)
        cut_off = [not answer.ended for answer in found if answer.not_asked is None]
        return Generations(
            texts=texts,
            judgments=judgments,
            duration_s=duration_s,
            n_tokens=sum(answer.n_tokens for answer in found) if generates else None,
            n_cut_off=sum(cut_off) if generates else None,
        )


def _perplexity(loss: float) -> float:
    return exp(min(loss, LARGEST_LOSS))
