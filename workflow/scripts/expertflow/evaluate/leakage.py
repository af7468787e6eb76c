"""Check again for leakage: held-out documents are kept in memory, training ones streamed."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.files import sha256_file, sha256_json, sha256_text
from expertflow.core.records import Record
from expertflow.data.documents import Document, iter_kept, make_ids_unique, normalize_text
from expertflow.data.records import Body, ShardRecord
from expertflow.data.render import join_question
from expertflow.data.shapes import frame_of, last_answer
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import TOO_LONG, PackingRecord
from expertflow.train.records import TrainingRecord

# Training documents kept for the baselines.
N_TRAINING_EXAMPLES = 2_000


class HeldOutSplit(Record, frozen=True, kw_only=True):
    """Held-out documents, how many have a trained question, and a sample of training."""

    held_out: list[Document]
    training: list[Document]
    n_shared_questions: int


def read_split(
    expert: str, shards: list[ShardRecord], keep: Path, *, packing: PackingRecord, seed: int
) -> HeldOutSplit:
    """Read both sides of the split and compare them.

    Raises EvaluationError if a held-out document is also in the training data, or the rows were
    packed from a different split.
    """
    counted = {"held_out": 0, "train": 0}

    def side(name: str) -> Iterator[Document]:
        for document in iter_kept(shards, keep, held_out=name == "held_out"):
            counted[name] += document.n_copies
            yield document

    held_out = make_ids_unique(side("held_out"))
    known = HeldOutHashes(held_out)
    # A generator: the training side is streamed, and only a sample is kept in memory.
    passing = (document for document in side("train") if known.mark_shared(document))
    training = heapq.nsmallest(N_TRAINING_EXAMPLES, passing, key=key_by_seed(seed))
    # Documents that the template cannot render are not counted as packed.
    dropped = packing.n_dropped_by_reason.keys() - {TOO_LONG}
    for name, split in (("held_out", packing.held_out), ("train", packing.train)):
        n, n_packed = counted[name], split.n_documents
        if n < n_packed or (not dropped and n > n_packed):
            raise EvaluationError(
                f"{expert}: the split has {n} documents for {name} but packing.json lists"
                f" {n_packed}, so the rows are from a different split; run pack_sequences again"
            )
    if n_shared := sum(map(known.shares_text, held_out)):
        raise EvaluationError(
            f"{expert}: {n_shared} held-out documents are also in the training data, in full or as"
            " the start of a chat; check duplicate_fields and group of the sources, and prepare the"
            " data again"
        )
    n_questions = sum(map(known.shares_question, held_out))
    return HeldOutSplit(held_out=held_out, training=training, n_shared_questions=n_questions)


def check_trained_rows(
    expert: str, *, training: TrainingRecord, packing: PackingRecord, rows: Path
) -> None:
    """Raise unless the model was trained on, and is evaluated on, the rows of this packing."""
    # The same hash as in train/job.py.
    splits = sha256_json([packing.train.sha256, packing.held_out.sha256])
    if training.packing_sha256 != splits:
        raise EvaluationError(
            f"{expert}: training.json and packing.json describe different rows, so held-out"
            " documents may have been trained on; run train_expert again"
        )
    file = rows / "held_out" / ROWS_FILE
    if not file.is_file() or sha256_file(file) != packing.held_out.sha256:
        raise EvaluationError(
            f"{file}: missing, or not the rows in packing.json; run pack_sequences again"
        )


def key_by_seed(seed: int) -> Callable[[Document], str]:
    """Return a sort key that depends only on the seed and a document's content."""
    return lambda document: sha256_text(f"{seed}:{document.text_hash}")


class HeldOutHashes:
    """Hashes of held-out documents, and which of them training documents share.

    ``text_hash`` covers only the fields that identify a document within its source, so complete
    contents are compared too. So is each learned turn of a training chat, because the chat may
    continue where a held-out one ends. Contents and answers can match only if the questions do.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self._texts: set[str] = set()
        self._questions: set[str] = set()
        # Last texts of held-out questions, so that few other chats are joined.
        self._last_texts: set[str] = set()
        self._seen: set[str] = set()
        for document in documents:
            self._texts.add(document.text_hash)
            self._questions.add(_question(document.body))
            if turns := document.body.turns:
                before = turns[: last_answer(document.body)]
                texts = filter(None, (normalize_text(one.content) for one in before))
                self._last_texts.update([*texts][-1:])

    def mark_shared(self, document: Document) -> bool:
        """Record what a training document shares; always true, so it can be used as a filter."""
        if document.text_hash in self._texts:
            self._seen.add(document.text_hash)
        if (question := _question(document.body)) in self._questions:
            self._seen |= {question, _content(document.body)}
        for question, answer in self._answered(document.body):
            self._seen |= {question, answer}
        return True

    def _answered(self, body: Body) -> Iterator[tuple[str, str]]:
        """Yield each held-out question that a learned turn of a chat answers, with its answer."""
        last = ""
        for i, turn in enumerate(body.turns):
            if turn.learned and last in self._last_texts:
                question = _question(replace(body, turns=body.turns[: i + 1]))
                if question in self._questions:
                    yield question, _answer(question, body, i)
            last = normalize_text(turn.content) or last  # a turn that calls a tool may have no text

    def shares_text(self, held_out: Document) -> bool:
        body, question = held_out.body, _question(held_out.body)
        if held_out.text_hash in self._seen:
            return True
        if question not in self._seen:
            return False
        # Or a training chat gives the same answer and continues.
        return _content(body) in self._seen or (
            body.text is None and _answer(question, body, last_answer(body)) in self._seen
        )

    def shares_question(self, held_out: Document) -> bool:
        return _question(held_out.body) in self._seen


def _question(body: Body) -> str:
    return sha256_text(normalize_text(join_question(body)))


def _answer(question: str, body: Body, at: int) -> str:
    roles = [
        [turn.role, [[call.name, call.arguments] for call in turn.tool_calls]]
        for turn in body.turns[: at + 1]
    ]
    return sha256_json([question, list(body.tools), roles, normalize_text(body.turns[at].content)])


def _content(body: Body) -> str:
    frame, texts = frame_of(body)
    return sha256_json([frame.decode("utf-8"), [normalize_text(text) for text in texts]])
