"""Choose the questions of an evaluation, from documents that training never saw."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from typing import TypeVar

from msgspec import field

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.documents import Document
from expertflow.data.records import Layout, Segment
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer, answered, question_of, question_text
from expertflow.evaluate.choose_checkpoint import n_to_report
from expertflow.evaluate.options import options_field, wordings
from expertflow.evaluate.records import EvaluationSpec, Example
from expertflow.evaluate.unseen import seeded_key
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize

log = logging.getLogger(__name__)
THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
# Stands for an answer where only what the template writes around one is looked at.
ANY_ANSWER = "\ue0f2"
Pair = tuple[list[int], list[int]]
T = TypeVar("T")


class Held(Record, frozen=True):
    """One held-out document, ready to be asked.

    A pair is what is given and what follows it, as training lays it out. ``reference`` has all that
    training learns of the answer: what the template writes around it, and the end, are part of it.
    ``options`` are those of a choice by their wording; in their pairs what the template writes
    before an answer is given.
    """

    example: Example
    prompt_ids: list[int]
    reference: Pair = field(default=([], []))
    options: dict[str, Pair] = field(default_factory=dict)


class Questions(Record, frozen=True):
    """Those that are reported, and those that only choose among checkpoints."""

    reported: list[Held]
    selection: list[Held]


class _Asked(Record, frozen=True):
    """A document cut into what a model is given and what it should write last."""

    document: Document
    segments: tuple[Segment, ...]
    answer: str

    @property
    def example(self) -> Example:
        return Example(
            document_id=self.document.document_id,
            prompt=question_text(self.document.body),
            reference=without_thoughts(self.answer),
            fields=self.document.fields,
        )


class _Laid(Record, frozen=True):
    """A question with its answer, any answer and the options, each as training would lay it out."""

    asked: _Asked
    reference: tuple[Segment, ...]
    any_answer: tuple[Segment, ...]
    options: dict[str, tuple[Segment, ...]]

    @property
    def all(self) -> list[tuple[Segment, ...]]:
        return [self.asked.segments, self.reference, self.any_answer, *self.options.values()]

    @property
    def preamble(self) -> str:
        """What the template writes itself before an answer, and training learns."""
        learned = "".join(s.text[a:b] for s in self.any_answer for a, b in s.learned)
        before, found, _after = learned.partition(ANY_ANSWER)
        return before if found else ""


def choose(
    documents: Iterable[Document], spec: EvaluationSpec, engine: Engine, layout: Layout
) -> Questions:
    """Choose the questions by a seeded hash and tokenise them as training saw them.

    The first ``max_examples`` are reported and the next ``n_selection_examples`` are for choosing,
    so how many are asked to choose by changes nothing that is reported. Where there are fewer, both
    have a share. What the model's chat template cannot write is no question, as it was no training
    document.

    Raises:
        EvaluationError: the template writes a stop text before every answer, or a record's options
            cannot be read.
    """
    ordered = sorted(documents, key=seeded_key(spec.seed))
    n_wanted = spec.max_examples + spec.n_selection_examples
    laid = list(islice(_laid(ordered, spec, layout), n_wanted))
    batch = tokenize([segments for one in laid for segments in one.all], engine)
    tokenised = zip(batch.ids.tolist(), batch.spans.tolist(), strict=True)
    held = [_held(one, list(islice(tokenised, len(one.all)))) for one in laid]
    n_reported = n_to_report(len(held), spec)
    return Questions(held[:n_reported], held[n_reported:])


def examples(documents: Iterable[Document], layout: Layout) -> list[Example]:
    """Give documents as examples, in their order, without those that are no question."""
    renderer = Renderer(layout)
    return [asked.example for asked in _made(lambda one: _asked(renderer, one), documents)]


def _laid(documents: Iterable[Document], spec: EvaluationSpec, layout: Layout) -> Iterator[_Laid]:
    renderer = Renderer(layout)
    choices = options_field(spec.fields) if spec.task == "multiple_choice" else None
    for laid in _made(lambda one: _lay_out(renderer, one, choices), documents):
        for stop in spec.decoding.stop:
            if stop in laid.preamble:
                raise EvaluationError(
                    f"decoding.stop: the model's chat template writes {stop!r} itself before every"
                    " answer, so that all would be empty; leave it out"
                )
        yield laid


def _made(make: Callable[[Document], T], documents: Iterable[Document]) -> Iterator[T]:
    """Make something of each document but plain texts, and those that cannot be written."""
    for document in documents:
        if document.body.text is not None:
            # It asks nothing.
            continue
        try:
            yield make(document)
        except Reject as reject:
            log.warning("%s is not asked: %s", document.document_id, reject)


def _asked(renderer: Renderer, document: Document) -> _Asked:
    return _Asked(document, *question_of(renderer, document.body))


def _lay_out(renderer: Renderer, document: Document, choices: str | None) -> _Laid:
    asked, body = _asked(renderer, document), document.body
    texts = [] if choices is None else wordings(asked.example, choices)
    return _Laid(
        asked,
        reference=answered(renderer, body),
        any_answer=answered(renderer, body, ANY_ANSWER),
        options={text: answered(renderer, body, text) for text in texts},
    )


def _held(laid: _Laid, tokenised: list[tuple[list[int], list[int]]]) -> Held:
    """Put a question together from the ids and learned spans of all its layouts."""
    (prompt, _none), *learned = tokenised
    # What follows the last learned token, e.g. a line end, nobody writes.
    wholes = [(ids[: spans[-1]], spans[0]) for ids, spans in learned]
    (reference, start), (any_answer, _start), *options = wholes
    n_given = min((_n_shared(any_answer, ids) for ids, _start in options), default=0)
    pairs = [(ids[:n_given], ids[n_given:]) for ids, _start in options]
    return Held(
        laid.asked.example,
        prompt,
        (reference[:start], reference[start:]),
        dict(zip(laid.options, pairs, strict=True)),
    )


def _n_shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def without_thoughts(text: str) -> str:
    """Leave out the block of thoughts that some models write before an answer."""
    return THOUGHTS.sub("", text)


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    """End a text before the first stop text in it."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
