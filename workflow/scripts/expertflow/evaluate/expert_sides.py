"""Ask one model after the other the same things: held-out documents, and the task's questions."""

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import field

from expertflow.core.records import Record
from expertflow.data.records import Layout
from expertflow.evaluate import generate
from expertflow.evaluate.ask import Held
from expertflow.evaluate.generate import Answer
from expertflow.evaluate.likelihood import choose_options, log_likelihoods
from expertflow.evaluate.losses import DocumentLosses, document_losses
from expertflow.evaluate.records import (
    EvaluationSide,
    EvaluationSpec,
    Example,
    TaskScore,
    Verdict,
)
from expertflow.evaluate.statistics import mean_interval, summarise
from expertflow.evaluate.tasks import metric_of, score
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.engine import Engine

log = logging.getLogger(__name__)
# Beyond it exp() leaves the range of floats.
LARGEST_LOSS = 700.0
# Below the checkpoint's folder; null is the base model.
Place = str | None
NOT_ASKED = "not_asked"


class Models:
    """The base model and the candidates, each loaded when it is asked for and another was before.

    ``load`` takes the folder of trained weights, or null for the base model. Who gets a model keeps
    no hold of it.
    """

    def __init__(self, load: Callable[[Path | None], Any], checkpoint: Path) -> None:
        self._load = load
        self._checkpoint = checkpoint
        self._held: tuple[Place, Any] | None = None
        self.n_loaded = 0

    def get(self, place: Place) -> Any:
        """Give the model of a place; whatever else was loaded is let go first."""
        if self._held is None or self._held[0] != place:
            self.release()
            log.info("loading %s", self.name(place))
            self._held = place, self._load(self.folder(place))
            self.n_loaded += 1
        return self._held[1]

    def folder(self, place: Place) -> Path | None:
        """Give the folder of trained weights; null for the base model."""
        return None if place is None else self._checkpoint / place

    def name(self, place: Place) -> str:
        """Name a model in a log."""
        return "the base model" if place is None else str(self.folder(place))

    def release(self) -> None:
        """Free the memory for the next model."""
        if self._held is None:
            return
        self._held = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Speaker(Record, frozen=True):
    """What turns ids into text and ends an answer."""

    engine: Engine
    layout: Layout

    @property
    def end_id(self) -> int:
        """Give the token that ends an assistant's turn."""
        return self.engine.special_id(self.layout.turn_end or self.layout.text_end)

    @property
    def pad_id(self) -> int:
        """Give a token that pads prompts; it is masked."""
        return self.engine.special_id(self.layout.text_end)


class Said(Record, frozen=True, kw_only=True):
    """What a model answered. Options that are chosen by likelihood are no generated tokens.

    ``n_cut_off`` leaves out what was not asked.
    """

    texts: list[str]
    verdicts: list[Verdict]
    duration_s: float
    n_tokens: int | None
    n_cut_off: int | None


class Outcome(Record, frozen=True, kw_only=True):
    """What one model did; ``reference_losses`` are nats a token on each question's reference."""

    side: EvaluationSide
    losses: DocumentLosses
    texts: list[str]
    verdicts: list[Verdict]
    reference_losses: list[float]


class Asker(Record, frozen=True, kw_only=True):
    """Asks models in turn; ``hindrance`` is the reason why answers cannot be scored here."""

    models: Models
    spec: EvaluationSpec
    speaker: Speaker
    held_out: PackedRows
    micro_batch_size: int
    metric: str | None
    hindrance: str | None
    _losses: dict[Place, DocumentLosses] = field(default_factory=dict)

    @property
    def can_answer(self) -> bool:
        """Tell whether there is a metric, and nothing in its way."""
        return self.metric is not None and self.hindrance is None

    def losses(self, place: Place) -> DocumentLosses:
        """Take the loss of each held-out document, once for each model."""
        if place not in self._losses:
            self._losses[place] = document_losses(
                self.models.get(place), self.held_out, micro_batch_size=self.micro_batch_size
            )
        return self._losses[place]

    def held_out_loss(self, place: Place) -> float:
        """Give the mean loss in nats a target."""
        losses = self.losses(place)
        return float(losses.nats_D.sum() / losses.n_targets_D.sum())

    def outcome(self, place: Place, asked: list[Held]) -> Outcome:
        """Ask one model everything."""
        log.info("%s: %d questions", self.models.name(place), len(asked))
        self.losses(place)
        asked = asked if self.can_answer else []
        references = self._reference_losses(place, asked) if asked else []
        said = self.said(place, asked) if asked else None
        return Outcome(
            side=self._side(place, said),
            losses=self.losses(place),
            texts=said.texts if said else [],
            verdicts=said.verdicts if said else [],
            reference_losses=references,
        )

    def said(self, place: Place, asked: Sequence[Held]) -> Said:
        """Let a model answer, and judge what it says."""
        writes = self.spec.task != "multiple_choice"
        found, duration_s = (self._answers if writes else self._chosen)(place, asked)
        texts = [answer.text for answer in found]
        verdicts = self.judge([held.example for held in asked], texts)
        for i, answer in enumerate(found):
            if answer.hindrance is not None:
                verdicts[i] = Verdict(correct=False, kind=NOT_ASKED, detail=answer.hindrance)
        cut_off = [not answer.ended for answer in found if answer.hindrance is None]
        return Said(
            texts=texts,
            verdicts=verdicts,
            duration_s=duration_s,
            n_tokens=sum(answer.n_tokens for answer in found) if writes else None,
            n_cut_off=sum(cut_off) if writes else None,
        )

    def judge(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Verdict]:
        """Judge one answer to each question."""
        spec = self.spec
        return score(
            spec.task,
            examples=examples,
            predictions=texts,
            fields=spec.fields,
            artefacts={name: Path(path) for name, path in spec.artefacts.items()},
        )

    def _answers(self, place: Place, asked: Sequence[Held]) -> tuple[list[Answer], float]:
        """Let a model write; with the seconds it took, without those of loading it."""
        spec, prompts = self.spec, [held.prompt_ids for held in asked]
        model = self.models.get(place)
        start = time.perf_counter()
        found = generate.answers(
            model,
            prompts,
            engine=self.speaker.engine,
            end_id=self.speaker.end_id,
            pad_id=self.speaker.pad_id,
            decoding=spec.decoding,
            max_new_tokens=spec.max_new_tokens,
            batch_size=spec.batch_size,
            seed=spec.seed,
        )
        return found, time.perf_counter() - start

    def _chosen(self, place: Place, asked: Sequence[Held]) -> tuple[list[Answer], float]:
        model = self.models.get(place)
        start = time.perf_counter()
        found = choose_options(
            model, asked, pad_id=self.speaker.pad_id, batch_size=self.spec.batch_size
        )
        return found, time.perf_counter() - start

    def _reference_losses(self, place: Place, asked: Sequence[Held]) -> list[float]:
        found = log_likelihoods(
            self.models.get(place),
            [held.reference for held in asked],
            pad_id=self.speaker.pad_id,
            batch_size=self.spec.batch_size,
        )
        return [-nats / n for nats, n in found]

    def _side(self, place: Place, said: Said | None) -> EvaluationSide:
        losses, loss = self.losses(place), self.held_out_loss(place)
        ci95 = mean_interval(losses.nats_D, losses.n_targets_D, self.spec.seed)
        return EvaluationSide(
            held_out_loss=loss,
            held_out_loss_ci95=ci95,
            perplexity=_perplexity(loss),
            perplexity_ci95=None if ci95 is None else (_perplexity(ci95[0]), _perplexity(ci95[1])),
            n_target_tokens=int(losses.n_targets_D.sum()),
            n_documents=int((losses.n_targets_D > 0).sum()),
            score=self._score(said),
            generation_s=said.duration_s if said else None,
            n_generated_tokens=said.n_tokens if said else None,
            n_cut_off=said.n_cut_off if said else None,
        )

    def _score(self, said: Said | None) -> TaskScore | None:
        if self.metric is None:
            return None
        if self.hindrance is not None:
            return TaskScore(
                metric=self.metric, n_examples=0, n_correct=0, value_fraction=None, ci95=None,
                n_by_kind={}, reason=self.hindrance,
            )  # fmt: skip
        return summarise(self.metric, said.verdicts if said else [])


def metric_or_none(spec: EvaluationSpec) -> str | None:
    """Name the task's metric; null where it has none beside the held-out loss."""
    return None if spec.task == "held_out_loss" else metric_of(spec)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, LARGEST_LOSS))
