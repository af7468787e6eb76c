"""Choose questions: of an evaluation from held-out documents, of recall from trained ones."""

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TypeVar

from msgspec import field
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.documents import Document, iter_kept, make_ids_unique
from expertflow.data.records import Layout, Segment, ShardRecord
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer, join_question, render_answer, split_question
from expertflow.data.shapes import last_answer
from expertflow.evaluate import lm_eval_tasks
from expertflow.evaluate.answer_text import without_thoughts
from expertflow.evaluate.choose_checkpoint import n_to_report
from expertflow.evaluate.leakage import key_by_seed
from expertflow.evaluate.records import Example, GenerationSpec, Judgment
from expertflow.evaluate.scoring import ScoringTask, make_task
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import TokenizerRecord
from expertflow.tokens.tokenize import tokenize

log = logging.getLogger(__name__)
# Placeholder, to find the template's text around an answer.
ANY_ANSWER = "\ue0f2"
# A wording's placeholder for the question.
QUESTION = "{question}"
# A larger share means a wrong setting rather than bad records.
MAX_UNUSABLE_FRACTION = 0.2
# With few questions one is already more: one of four is a quarter.
N_ALWAYS_TOLERATED = 2
# If none of the first ones can be judged, no more are tried.
N_FIRST = 10

Pair = tuple[list[int], list[int]]
Judge = Callable[[Sequence[Example], Sequence[str]], list[Judgment]]
T = TypeVar("T")


class EvalExample(Record, frozen=True):
    """One held-out document, ready to be asked.

    A pair is a prompt and its continuation, laid out as in training. ``reference`` has all of the
    answer that training learns, including the template's own text around it and the end.
    ``options`` maps the wording of each choice to its pair; there the template's text before an
    answer belongs to the prompt.
    """

    example: Example
    prompt_ids: list[int]
    reference: Pair = field(default=([], []))
    options: dict[str, Pair] = field(default_factory=dict)


class Questions(Record, frozen=True):
    reported: list[EvalExample]
    selection: list[EvalExample]
    unusable: list[str]


def check_references(
    *,
    expert: str,
    spec: GenerationSpec,
    shards: list[ShardRecord],
    keep: Path,
    tokenizer: TokenizerRecord,
) -> dict[str, object]:
    """Choose questions as ``generate_answers`` will, before training is paid for.

    Raises EvaluationError as it would, also for lm-eval tasks as far as they can be found here.
    That the task is unavailable here is only a warning, since another machine may score it.
    """
    task, questions = make_task(spec), Questions([], [], [])
    reason = None if task is None else task.unavailable_reason()
    if reason is not None:
        log.warning("%s: held-out references are not checked here: %s", expert, reason)
    elif task is not None:
        held_out = make_ids_unique(iter_kept(shards, keep, held_out=True))
        engine, layout = Engine(Path(tokenizer.path)), tokenizer.layout
        questions = choose_questions(held_out, spec, task, engine=engine, layout=layout)
        # The first wording only: others have the same references.
        next(iter_recall(shards, keep, spec, task, engine=engine, layout=layout), None)
    if spec.lm_eval is not None and lm_eval_tasks.find_tasks(spec.lm_eval)[0] is None:
        log.warning("%s: evaluation.lm_eval: %s", expert, lm_eval_tasks.unavailable_reason())
    n = len(questions.reported) + len(questions.selection)
    found = {"n_questions": n, "unusable": questions.unusable, "unavailable_reason": reason}
    return {"expert": expert, **found}


def choose_questions(
    documents: Iterable[Document],
    spec: GenerationSpec,
    task: ScoringTask,
    *,
    engine: Engine,
    layout: Layout,
) -> Questions:
    """Choose questions by a seeded hash and tokenize them as in training.

    The first ``max_examples`` are reported and the next ``n_selection_examples`` choose, so the
    number of the latter does not affect the report; with too few, both get a share. References are
    judged before a model is run, and unusable ones are replaced by others. Documents that the chat
    template cannot render are not asked, just as they were not trained on.

    Raises EvaluationError if more than a fifth of the references tried cannot be judged, the
    template writes a stop text before every answer, or a record's options cannot be read.
    """
    renderer = Renderer(layout)
    ordered = sorted(documents, key=key_by_seed(spec.seed))
    kept, reasons = _choose_judgeable(ordered, renderer, spec, task.score)
    found = list(_made(lambda one: _eval_example(renderer, one, task, engine), kept))
    n_reported = n_to_report(len(found), spec)
    return Questions(found[:n_reported], found[n_reported:], reasons)


def make_examples(documents: Iterable[Document], layout: Layout) -> list[Example]:
    """Return documents as examples, in order, without those that ask nothing."""
    renderer = Renderer(layout)
    return list(_made(lambda one: _example(renderer, one)[0], documents))


def _choose_judgeable(
    ordered: Iterable[Document], renderer: Renderer, spec: GenerationSpec, judge: Judge
) -> tuple[list[Document], list[str]]:
    """Return the first documents with judgeable references, and why others were rejected."""
    n_wanted = spec.max_examples + spec.n_selection_examples
    questions = _made(lambda one: (one, _example(renderer, one)[0]), ordered)
    kept: list[Document] = []
    reasons: list[str] = []
    n_next = min(N_FIRST, n_wanted)
    while tried := list(islice(questions, n_next)):
        found = find_unusable([example for _, example in tried], judge)
        kept += [document for i, (document, _) in enumerate(tried) if i not in found]
        reasons += [found[i] for i in sorted(found)]
        if not kept:
            break
        n_next = n_wanted - len(kept)  # as many as were unusable
    n_bad, n_tried = len(reasons), len(kept) + len(reasons)
    if n_bad > max(MAX_UNUSABLE_FRACTION * n_tried, N_ALWAYS_TOLERATED if kept else 0):
        raise EvaluationError(
            f"{n_bad} of {n_tried} references cannot be judged by evaluation.task"
            f" {spec.task}; correct the setting or the data. The first: {reasons[0]}"
        )
    if reasons:
        fix = "correct them, or drop them with a source's checks"
        how_many = f"{n_bad} of {n_tried} references cannot be judged and are not asked"
        log.warning("%s; %s. The first: %s", how_many, fix, reasons[0])
    return kept, reasons


def choose_recall(shards: list[ShardRecord], keep: Path, spec: GenerationSpec) -> list[Document]:
    """Choose training documents by a seeded hash."""
    documents = iter_kept(shards, keep, held_out=False)
    chosen = heapq.nsmallest(spec.n_recall_examples, documents, key=key_by_seed(spec.seed))
    return make_ids_unique(chosen)


def iter_recall(
    shards: list[ShardRecord],
    keep: Path,
    spec: GenerationSpec,
    task: ScoringTask,
    *,
    engine: Engine,
    layout: Layout,
) -> Iterator[tuple[str, list[EvalExample]]]:
    """Yield each wording with its questions about trained documents."""
    if not spec.n_recall_examples:
        return
    documents = choose_recall(shards, keep, spec)
    changed = replace(spec, max_examples=spec.n_recall_examples, n_selection_examples=0)
    for wording in (QUESTION,) if spec.rephrase is None else (QUESTION, spec.rephrase):
        reworded = [reword(document, wording) for document in documents]
        found = choose_questions(reworded, changed, task, engine=engine, layout=layout)
        yield wording, found.reported


def reword(document: Document, wording: str) -> Document:
    """Return a chat with its last question before the answer reworded."""
    turns = list(document.body.turns)
    before = range(last_answer(document.body)) if turns else ()
    if not (asked := [i for i in before if turns[i].role == "user"]):
        return document
    last = turns[asked[-1]]
    # "In other words: {question}".
    turns[asked[-1]] = replace(last, content=wording.replace(QUESTION, last.content))
    return replace(document, body=replace(document.body, turns=tuple(turns)))


def find_unusable(asked: Sequence[Example], judge: Judge) -> dict[int, str]:
    """Map indices of unjudgeable references to reasons; bisects, as judges may start a process."""
    if not asked:
        return {}
    try:
        judge(asked, [example.reference for example in asked])
    except EvaluationError as error:
        if len(asked) == 1:
            return {0: str(error)}
        # The judge raises at the first unusable reference, so bisect to find them all.
        middle = len(asked) // 2
        later = find_unusable(asked[middle:], judge)
        return find_unusable(asked[:middle], judge) | {middle + i: why for i, why in later.items()}
    return {}


def _made(make: Callable[[Document], T], documents: Iterable[Document]) -> Iterator[T]:
    n_rejected = 0
    try:
        for document in documents:
            try:
                # Plain text asks nothing.
                if document.body.text is None:
                    yield make(document)
            except Reject as reject:
                n_rejected += 1
                if n_rejected == 1:
                    log.warning("%s is not asked: %s", document.document_id, reject)
    finally:
        if n_rejected > 1:
            log.warning("nor are %d others", n_rejected - 1)


def _example(renderer: Renderer, document: Document) -> tuple[Example, tuple[Segment, ...]]:
    prompt, answer = split_question(renderer, document.body)
    example = Example(
        document_id=document.document_id,
        prompt=join_question(document.body),
        reference=without_thoughts(answer, prompt[-1].text),
        fields=document.fields,
    )
    return example, prompt


def _eval_example(
    renderer: Renderer, document: Document, task: ScoringTask, engine: Engine
) -> EvalExample:
    """Tokenize a question with its answer, any answer and each option, as in training."""
    example, prompt = _example(renderer, document)
    texts = task.list_options(example)
    any_answer = render_answer(renderer, document.body, ANY_ANSWER)
    _check_stops(any_answer, task.spec.decoding.stop)
    batch = tokenize(
        [
            prompt,
            render_answer(renderer, document.body),
            any_answer,
            *(render_answer(renderer, document.body, text) for text in texts),
        ],
        engine,
    )
    (prompt_ids, *learned), (_none, *spans) = batch.ids.tolist(), batch.spans.tolist()
    # Nothing after the last learned token, e.g. a line end, is generated.
    reference, around, *options = (ids[: s[-1]] for ids, s in zip(learned, spans, strict=True))
    start = spans[0][0]
    # A token that spans the template and the option is not shared, so it is scored.
    n_given = min((_n_shared(around, ids) for ids in options), default=0)
    pairs = [(ids[:n_given], ids[n_given:]) for ids in options]
    return EvalExample(
        example,
        prompt_ids,
        (reference[:start], reference[start:]),
        dict(zip(texts, pairs, strict=True)),
    )


def _check_stops(any_answer: Sequence[Segment], stops: tuple[str, ...]) -> None:
    """Reject stop texts that the template itself writes before an answer and training learns."""
    learned = "".join(s.text[a:b] for s in any_answer for a, b in s.learned)
    before, found, _after = learned.partition(ANY_ANSWER)
    for stop in stops:
        if found and stop in before:
            raise EvaluationError(
                f"decoding.stop: the model's chat template itself writes {stop!r} before every"
                " answer, so all answers would be empty; remove it"
            )


def _n_shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
