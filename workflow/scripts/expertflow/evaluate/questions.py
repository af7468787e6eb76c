"""Choose the questions of an evaluation, from documents that training never saw."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TypeVar

from msgspec import field

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.documents import Document
from expertflow.data.records import Layout, Segment
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer, answered, question_of, question_text
from expertflow.evaluate.answer_text import without_thoughts
from expertflow.evaluate.choose_checkpoint import n_to_report
from expertflow.evaluate.leakage import seeded_key
from expertflow.evaluate.records import EvaluationSpec, Example, Verdict
from expertflow.evaluate.tasks.choice import wordings
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize

log = logging.getLogger(__name__)
# Stands for an answer where only what the template writes around one is looked at.
ANY_ANSWER = "\ue0f2"
# Beyond it the setting is wrong, not a record here and there.
MAX_UNUSABLE_FRACTION = 0.2
# Of a handful of questions one is a fifth.
N_ALWAYS_BORNE = 2
# If none of so many can be judged, no more are tried.
N_FIRST = 10
# Documents that are laid out at a time: a chat template is read once for them.
N_LAID_OUT = 100

Pair = tuple[list[int], list[int]]
Judge = Callable[[Sequence[Example], Sequence[str]], list[Verdict]]
T = TypeVar("T")


class EvalExample(Record, frozen=True):
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

    reported: list[EvalExample]
    selection: list[EvalExample]


class RenderedExample(Record, frozen=True):
    """A question with its answer, any answer and the options, each as training would lay it out."""

    example: Example
    prompt: tuple[Segment, ...]
    reference: tuple[Segment, ...]
    any_answer: tuple[Segment, ...]
    options: dict[str, tuple[Segment, ...]]

    @property
    def layouts(self) -> list[tuple[Segment, ...]]:
        return [self.prompt, self.reference, self.any_answer, *self.options.values()]

    @property
    def preamble(self) -> str:
        """What the template writes itself before an answer, and training learns."""
        learned = "".join(s.text[a:b] for s in self.any_answer for a, b in s.learned)
        before, found, _after = learned.partition(ANY_ANSWER)
        return before if found else ""


def choose_questions(
    documents: Iterable[Document], spec: EvaluationSpec, engine: Engine, layout: Layout
) -> Questions:
    """Choose the questions by a seeded hash and tokenize them as training saw them.

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
    rendered = list(islice(_rendered(ordered, spec, layout), n_wanted))
    batch = tokenize([segments for one in rendered for segments in one.layouts], engine)
    tokenised = zip(batch.ids.tolist(), batch.spans.tolist(), strict=True)
    found = [_eval_example(one, list(islice(tokenised, len(one.layouts)))) for one in rendered]
    n_reported = n_to_report(len(found), spec)
    return Questions(found[:n_reported], found[n_reported:])


def examples(documents: Iterable[Document], layout: Layout) -> list[Example]:
    """Return documents as examples, in their order, without those that are no question."""
    renderer = Renderer(layout)
    return list(_made(lambda one: _example(renderer, one)[0], documents))


def choose_judgeable(
    documents: Iterable[Document], spec: EvaluationSpec, layout: Layout, judge: Judge
) -> tuple[list[Document], list[str]]:
    """Take as many documents as an evaluation asks, in its order, whose references can be judged.

    Done before a model is paid to answer them. Return why others were left out, too.

    Raises:
        EvaluationError: more than a fifth of those that were tried cannot be.
    """
    n_wanted = spec.max_examples + spec.n_selection_examples
    questions = _in_chunks(sorted(documents, key=seeded_key(spec.seed)), layout)
    kept: list[Document] = []
    reasons: list[str] = []
    n_next = min(N_FIRST, n_wanted)
    while tried := list(islice(questions, n_next)):
        found = unusable([example for _, example in tried], judge)
        kept += [document for i, (document, _) in enumerate(tried) if i not in found]
        reasons += [found[i] for i in sorted(found)]
        if not kept:
            break
        n_next = n_wanted - len(kept)
    n_bad, n_tried = len(reasons), len(kept) + len(reasons)
    if n_bad > max(MAX_UNUSABLE_FRACTION * n_tried, N_ALWAYS_BORNE if kept else 0):
        raise EvaluationError(
            f"{n_bad} of {n_tried} held-out references cannot be judged by evaluation.task"
            f" {spec.task}; correct the setting or the data. The first: {reasons[0]}"
        )
    if reasons:
        log.warning("%d references cannot be judged, the first: %s", n_bad, reasons[0])
    return kept, reasons


def unusable(asked: Sequence[Example], judge: Judge) -> dict[int, str]:
    """Map the places of examples whose references cannot be judged to the reasons.

    All are judged at once, as many judges start a process; where that fails, halves are.
    """
    if not asked:
        return {}
    try:
        judge(asked, [example.reference for example in asked])
    except EvaluationError as error:
        if len(asked) == 1:
            return {0: str(error)}
        middle = len(asked) // 2
        later = unusable(asked[middle:], judge)
        return unusable(asked[:middle], judge) | {middle + i: why for i, why in later.items()}
    return {}


def _in_chunks(documents: Iterable[Document], layout: Layout) -> Iterator[tuple[Document, Example]]:
    left = iter(documents)
    while some := list(islice(left, N_LAID_OUT)):
        found = {example.document_id: example for example in examples(some, layout)}
        for document in some:
            if document.document_id in found:
                yield document, found[document.document_id]


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


def _rendered(
    documents: Iterable[Document], spec: EvaluationSpec, layout: Layout
) -> Iterator[RenderedExample]:
    renderer = Renderer(layout)

    def render(document: Document) -> RenderedExample:
        example, prompt = _example(renderer, document)
        texts = wordings(example, spec.fields) if spec.task == "multiple_choice" else []
        return RenderedExample(
            example,
            prompt,
            reference=answered(renderer, document.body),
            any_answer=answered(renderer, document.body, ANY_ANSWER),
            options={text: answered(renderer, document.body, text) for text in texts},
        )

    for rendered in _made(render, documents):
        for stop in spec.decoding.stop:
            if stop in rendered.preamble:
                raise EvaluationError(
                    f"decoding.stop: the model's chat template writes {stop!r} itself before every"
                    " answer, so that all would be empty; leave it out"
                )
        yield rendered


def _example(renderer: Renderer, document: Document) -> tuple[Example, tuple[Segment, ...]]:
    prompt, answer = question_of(renderer, document.body)
    example = Example(
        document_id=document.document_id,
        prompt=question_text(document.body),
        reference=without_thoughts(answer),
        fields=document.fields,
    )
    return example, prompt


def _eval_example(
    rendered: RenderedExample, tokenised: list[tuple[list[int], list[int]]]
) -> EvalExample:
    """Assemble a question from the ids and learned spans of all its layouts."""
    (prompt, _none), *learned = tokenised
    # What follows the last learned token, e.g. a line end, nobody writes.
    wholes = [(ids[: spans[-1]], spans[0]) for ids, spans in learned]
    (reference, start), (any_answer, _start), *options = wholes
    n_given = min((_n_shared(any_answer, ids) for ids, _start in options), default=0)
    pairs = [(ids[:n_given], ids[n_given:]) for ids, _start in options]
    return EvalExample(
        rendered.example,
        prompt,
        (reference[:start], reference[start:]),
        dict(zip(rendered.options, pairs, strict=True)),
    )


def _n_shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
