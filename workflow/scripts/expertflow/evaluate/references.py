"""Find questions whose own reference cannot be judged, before a model is paid to answer them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.documents import Document
from expertflow.data.records import Layout
from expertflow.evaluate.ask import examples
from expertflow.evaluate.records import EvaluationSpec, Example, Verdict
from expertflow.evaluate.unseen import seeded_key

log = logging.getLogger(__name__)
# Beyond it the setting is wrong, not a record here and there.
MAX_UNUSABLE_FRACTION = 0.2
# Of a handful of questions one is a fifth.
N_ALWAYS_BORNE = 2
# If none of so many can be judged, no more are tried.
N_FIRST = 10
# Documents that are laid out at a time: a chat template is read once for them.
N_LAID_OUT = 100

Judge = Callable[[Sequence[Example], Sequence[str]], list[Verdict]]


class Judgeable(Record, frozen=True, kw_only=True):
    """Documents that can be asked, and what was left out for them. ``reason`` is of the first."""

    documents: list[Document]
    n_unusable: int
    reason: str | None


def judgeable(
    documents: Iterable[Document], spec: EvaluationSpec, layout: Layout, judge: Judge
) -> Judgeable:
    """Take as many documents as an evaluation asks, in its order, whose references can be judged.

    Raises:
        EvaluationError: more than a fifth of those that were tried cannot be.
    """
    n_wanted = spec.max_examples + spec.n_selection_examples
    questions = _questions(sorted(documents, key=seeded_key(spec.seed)), layout)
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
    n, n_bad = len(kept) + len(reasons), len(reasons)
    if n_bad > max(MAX_UNUSABLE_FRACTION * n, N_ALWAYS_BORNE if kept else 0):
        raise EvaluationError(
            f"{n_bad} of {n} held-out references cannot be judged by evaluation.task {spec.task};"
            f" correct the setting or the data. The first: {reasons[0]}"
        )
    if reasons:
        log.warning("%d references cannot be judged, the first: %s", n_bad, reasons[0])
    return Judgeable(documents=kept, n_unusable=len(reasons), reason=next(iter(reasons), None))


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


def _questions(documents: Iterable[Document], layout: Layout) -> Iterator[tuple[Document, Example]]:
    left = iter(documents)
    while some := list(islice(left, N_LAID_OUT)):
        found = {example.document_id: example for example in examples(some, layout)}
        for document in some:
            if document.document_id in found:
                yield document, found[document.document_id]
