"""Score an expert before and after training, on documents that training never saw."""

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from expertflow.core.errors import EvaluationError
from expertflow.core.files import sha256_text
from expertflow.data.documents import Document
from expertflow.data.records import Layout, Segment
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer, question_of, question_text
from expertflow.evaluate.generate import generate
from expertflow.evaluate.records import (
    EvaluationRecord,
    EvaluationSample,
    EvaluationSide,
    EvaluationSpec,
    Example,
    TaskScore,
    Verdict,
)
from expertflow.evaluate.scores import summarise
from expertflow.evaluate.tasks import METRICS, score
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenise import tokenise
from expertflow.train.heldout import held_out_loss
from expertflow.train.model import PackedLoss, causal_lm

log = logging.getLogger(__name__)
N_SAMPLES = 12
THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
# Generation pads on the left and masks, which the packed route does not know.
GENERATION_ATTENTION = "sdpa"


@dataclass(frozen=True, slots=True)
class Held:
    """One held-out document, ready to be asked."""

    example: Example
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Speaker:
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one model did."""

    side: EvaluationSide
    answers: list[str]
    verdicts: list[Verdict]


def evaluate_expert(
    *,
    expert: str,
    spec: EvaluationSpec,
    documents: list[Document],
    rows: Path,
    tokenizer: Path,
    layout: Layout,
    load_before: Callable[[], Any],
    load_after: Callable[[], Any],
    micro_batch_size: int,
) -> EvaluationRecord:
    """Ask both models the same questions; models are loaded one after the other.

    Raises:
        EvaluationError: a held-out document is also in the training data.
    """
    start = time.perf_counter()
    n_shared = shared_with_training(documents)
    if n_shared:
        raise EvaluationError(f"{expert}: {n_shared} held-out documents are in the training data")
    held_out = [d for d in documents if d.held_out]
    engine = Engine(tokenizer)
    speaker = Speaker(engine, layout)
    asked = [] if spec.task == "held_out_loss" else choose(held_out, spec, engine, layout)
    outcomes = []
    for name, load in (("before", load_before), ("after", load_after)):
        log.info("evaluating the model %s training: %d questions", name, len(asked))
        outcomes.append(_outcome(load(), spec, asked, rows, speaker, micro_batch_size))
    before, after = outcomes
    return EvaluationRecord(
        expert=expert,
        task=spec.task,
        before=before.side,
        after=after.side,
        n_held_out_documents=len(held_out),
        n_documents_shared_with_training=n_shared,
        samples=tuple(samples(asked, before, after)),
        wall_s=time.perf_counter() - start,
    )


def shared_with_training(documents: list[Document]) -> int:
    """Count held-out documents whose text is also trained on."""
    trained = {d.text_hash for d in documents if not d.held_out}
    return sum(d.held_out and d.text_hash in trained for d in documents)


def choose(
    documents: list[Document], spec: EvaluationSpec, engine: Engine, layout: Layout
) -> list[Held]:
    """Choose the questions by a seeded hash and tokenise them as training saw them.

    What the model's chat template cannot write is no question, as it was no training document.
    """
    renderer = Renderer(layout)
    chosen: list[Document] = []
    questions: list[tuple[Segment, ...]] = []
    references: list[str] = []
    for document in sorted(documents, key=lambda d: sha256_text(f"{spec.seed}:{d.text_hash}")):
        try:
            question, reference = question_of(renderer, document.body)
        except Reject as reject:
            log.warning("%s is not asked: %s", document.document_id, reject)
            continue
        chosen.append(document)
        questions.append(question)
        references.append(without_thoughts(reference))
        if len(chosen) == spec.max_examples:
            break
    return [
        Held(
            Example(
                document_id=document.document_id,
                prompt=question_text(document.body),
                reference=reference,
                fields=document.fields,
            ),
            ids,
        )
        for document, reference, ids in zip(
            chosen, references, tokenise(questions, engine).ids.tolist(), strict=True
        )
    ]


def samples(asked: list[Held], before: Outcome, after: Outcome) -> list[EvaluationSample]:
    """Show some questions: right and wrong answers in turn, as long as there are both."""
    right = [i for i, verdict in enumerate(after.verdicts) if verdict.correct]
    wrong = [i for i, verdict in enumerate(after.verdicts) if not verdict.correct]
    in_turn = [i for pair in zip_longest(right, wrong) for i in pair if i is not None]
    chosen = in_turn[:N_SAMPLES]
    return [
        EvaluationSample(
            document_id=asked[i].example.document_id,
            prompt=asked[i].example.prompt,
            reference=asked[i].example.reference,
            before=before.answers[i],
            after=after.answers[i],
            kind_before=before.verdicts[i].kind,
            kind_after=after.verdicts[i].kind,
        )
        for i in chosen
    ]


def _outcome(
    model: Any,
    spec: EvaluationSpec,
    asked: list[Held],
    rows: Path,
    speaker: Speaker,
    micro_batch_size: int,
) -> Outcome:
    loss, n_targets = held_out_loss(
        PackedLoss(model).eval(), read_rows(rows / "held_out"), micro_batch_size=micro_batch_size
    )
    answers: list[str] = []
    verdicts: list[Verdict] = []
    result: TaskScore | None = None
    seconds = None
    if asked:
        start = time.perf_counter()
        answers = _answers(model, spec, asked, speaker)
        seconds = time.perf_counter() - start
        verdicts = score(
            spec.task,
            examples=[held.example for held in asked],
            predictions=answers,
            fields=spec.fields,
            artefacts={name: Path(path) for name, path in spec.artefacts.items()},
        )
        result = summarise(METRICS[spec.task], verdicts)
    side = EvaluationSide(
        held_out_loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        n_target_tokens=n_targets,
        score=result,
        generation_s=seconds,
    )
    return Outcome(side, answers, verdicts)


def _answers(model: Any, spec: EvaluationSpec, asked: list[Held], speaker: Speaker) -> list[str]:
    causal_lm(model).set_attn_implementation(GENERATION_ATTENTION)
    with torch.inference_mode():
        ids = generate(
            model,
            [held.prompt_ids for held in asked],
            end_id=speaker.end_id,
            pad_id=speaker.pad_id,
            max_new_tokens=spec.max_new_tokens,
            batch_size=spec.batch_size,
        )
    texts = (without_thoughts(speaker.engine.decode(answer)) for answer in ids)
    return [cut_at(text, spec.stop) for text in texts]


def without_thoughts(text: str) -> str:
    """Leave out the block of thoughts that some models write before an answer."""
    return THOUGHTS.sub("", text)


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    """End a text before the first stop text in it."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
