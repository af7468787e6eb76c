"""Turn documents into token ids and supervised spans, in batches.

A *piece* is one segment as ids. The engine encodes all texts in one call; numpy does the rest. Most
documents are laid out as columns of texts, the others one by one.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.data.documents import iter_kept
from expertflow.data.records import Body, Layout, Segment, ShardRecord
from expertflow.data.reject import Reject
from expertflow.data.render import Blank, DocumentForm, Renderer
from expertflow.data.shapes import body_of
from expertflow.tokens.arrow import PAD_ID, PackedRows
from expertflow.tokens.engine import Engine
from expertflow.tokens.packing import clip_spans
from expertflow.tokens.ragged import Ints, Ragged, offsets_of, run_indices

log = logging.getLogger(__name__)
# Texts up to this length are encoded once per batch, such as the newline after each turn.
SHORT_CHARS = 16
# A span that starts or ends with its piece needs no encoded text to locate that edge.
NO_EDGE = -1
# Frames with fewer documents in a batch are rendered one by one.
FEW = 4
N_FORMS = 512
# Documents that verify a form before it is used.
N_TRIED = 16
N_EXAMPLES = 3


class TokenBatch(Record, frozen=True):
    ids: Ragged
    spans: Ragged


class BatchDraft(Struct):
    """Documents being laid out: texts to encode, and the pieces of each document.

    Pieces are numbered from 0 for special tokens, from -1 down for texts. A chunk holds document
    numbers, pieces per document, and these pieces. A learned span is a row of four: document, its
    piece index, and the ``edges`` numbers of the texts before its start and end. ``dropped``
    contains why documents cannot be rendered, with the first few ``examples``.
    """

    n_documents: int
    document_ids: pa.StringArray | None = None
    special_text: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    dropped: list[str | None] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    edges: dict[str, int] = field(default_factory=dict)
    _short: dict[str, int] = field(default_factory=dict)
    _chunks: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)
    _learned: list[Ints] = field(default_factory=list)

    def add_document(self, number: int, segments: Sequence[Segment]) -> None:
        pieces = [self._piece(segment) for segment in segments]
        learned = [
            [number, i, self._edge(s.text, start), self._edge(s.text, end)]
            for i, s in enumerate(segments)
            for start, end in s.learned
        ]
        self._chunks.append((np.array([number]), np.array([len(pieces)]), np.array(pieces, int)))
        self._learned.append(np.array(learned, int).reshape(-1, 4))

    def add_form(self, numbers: Ints, form: DocumentForm, texts: Sequence[pa.StringArray]) -> None:
        """Add documents of one form; column i of ``texts`` fills their blank i."""
        n = len(numbers)
        pieces = np.empty((n, len(form.items)), np.int64)
        for i, item in enumerate(form.items):
            if isinstance(item, Segment):
                pieces[:, i] = self._piece(item)
                start = self._edge(item.text, item.learned[0][0]) if item.learned else None
            else:
                whole = pc.binary_join_element_wise(item.before, texts[item.text], item.after, "")
                pieces[:, i] = ~np.arange(len(self.texts), len(self.texts) + n)
                self.texts += whole.to_pylist()
                start = None
                if item.learned_from is not None:
                    # The span continues after the prefix that all of them share.
                    start = self._edge(f"{item.before} ", item.learned_from)
            if start is not None:
                line = np.array([0, i, start, NO_EDGE])
                self._learned.append(np.repeat(line[None], n, axis=0))
                self._learned[-1][:, 0] = numbers
        self._chunks.append((numbers, np.full(n, len(form.items)), pieces.reshape(-1)))

    def encode_texts(self, engine: Engine) -> Ragged:
        return engine.encode_flat([*self.texts, *self.edges])

    def assemble_tokens(self, encoded: Ragged, engine: Engine) -> TokenBatch:
        """Assemble drafted and encoded documents; those without a draft get no tokens.

        The text before a learned span is also tokenized separately, to find where the span starts.
        """
        special = np.array([engine.special_id(token) for token in self.special], np.int32)
        n_special = len(special)
        known = Ragged(
            np.concatenate((special, encoded.values)),
            np.concatenate((np.arange(n_special), n_special + encoded.offsets)),
        )
        pieces, document_at = self._pieces()
        # Special tokens are first, then texts: -1 -> n_special, -2 -> n_special + 1.
        laid = known.take(np.where(pieces >= 0, pieces, n_special + ~pieces))
        bounds = laid.offsets[document_at]
        learned = np.concatenate([np.empty((0, 4), np.int64), *self._learned])
        # Ordered by document, then piece.
        number, place, start, end = learned[np.lexsort((learned[:, 1], learned[:, 0]))].T
        at = document_at[number] + place
        first_edge = n_special + len(self.texts)
        own = [known[first_edge + i] for i in range(len(self.edges))]
        low = laid.offsets[at] + _leading(start, at, laid, own)
        high = np.where(
            end == NO_EDGE, laid.offsets[at + 1], laid.offsets[at] + _leading(end, at, laid, own)
        )
        kept = low < high
        spans = _by_document(low[kept], high[kept], number[kept], bounds)
        return TokenBatch(Ragged(laid.values, bounds), spans)

    def _pieces(self) -> tuple[Ints, Ints]:
        if not self._chunks:
            return np.empty(0, np.int64), np.zeros(self.n_documents + 1, np.int64)
        numbers, counts, pieces = (np.concatenate(c) for c in zip(*self._chunks, strict=True))
        order = np.argsort(numbers)
        per_document = np.zeros(self.n_documents, np.int64)
        per_document[numbers] = counts
        laid = pieces[run_indices(offsets_of(counts)[:-1][order], counts[order])]
        return laid, offsets_of(per_document)

    def _piece(self, segment: Segment) -> int:
        text = segment.text
        if segment.special:
            return self.special.setdefault(text, len(self.special))
        number = ~len(self.texts)
        if len(text) <= SHORT_CHARS:
            number = self._short.setdefault(text, number)
        if number == ~len(self.texts):
            self.texts.append(text)
        return number

    def _edge(self, text: str, at: int) -> int:
        if at in (0, len(text)):
            return NO_EDGE
        return self.edges.setdefault(text[:at], len(self.edges))


def tokenize(documents: Sequence[Sequence[Segment]], engine: Engine) -> TokenBatch:
    draft = BatchDraft(len(documents))
    for number, document in enumerate(documents):
        draft.add_document(number, document)
    return draft.assemble_tokens(draft.encode_texts(engine), engine)


def _leading(edge: Ints, at: Ints, laid: Ragged, own: Sequence[np.ndarray]) -> Ints:
    """Count each piece's leading ids that belong entirely to the text before an edge.

    A token that merges across the edge is the first one after it.
    """
    counts = np.zeros(len(at), np.int64)
    order = np.argsort(edge, kind="stable")
    bounds = np.searchsorted(edge[order], np.arange(len(own) + 1))
    for number, ids in enumerate(own):
        members = order[bounds[number] : bounds[number + 1]]
        # Most documents laid out alone have unique edges: one comparison instead of a loop.
        if len(members) == 1:
            piece = laid[int(at[members[0]])]
            n = min(len(piece), len(ids))
            differs = np.flatnonzero(piece[:n] != ids[:n])
            counts[members] = differs[0] if len(differs) else n
            continue
        starts, ends = laid.offsets[at[members]], laid.offsets[at[members] + 1]
        equal = np.ones(len(members), bool)
        for j, token in enumerate(ids.tolist()):
            there = starts + j
            equal &= there < ends
            equal[equal] = laid.values[there[equal]] == token
            counts[members] += equal
    return counts


def _by_document(low: Ints, high: Ints, document: Ints, bounds: Ints) -> Ragged:
    # [0, 3) and [3, 5) of a document -> [0, 5).
    touches = np.zeros(len(low), bool)
    touches[1:] = (low[1:] == high[:-1]) & (document[1:] == document[:-1])
    first = np.flatnonzero(~touches)
    last = np.append(first[1:], len(low)) - 1 if len(first) else first
    document = document[first]
    merged = np.stack((low[first], high[last]), axis=1) - bounds[document][:, None]
    n_spans = np.bincount(document, minlength=len(bounds) - 1)
    return Ragged(merged.reshape(-1).astype(np.int32), offsets_of(2 * n_spans))


class Drafter:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._forms: dict[bytes, DocumentForm | None] = {}

    def draft_batch(self, part: pa.RecordBatch) -> BatchDraft:
        """Lay out some documents; those that cannot be rendered get a reason and no tokens.

        Documents with one frame become columns if the layout does not depend on their texts.
        """
        n = part.num_rows
        made = BatchDraft(n, part["document_id"], np.zeros(n, bool), [None] * n)
        frames = part["frame"].dictionary_encode()
        codes = frames.indices.to_numpy()
        by_code = np.argsort(codes, kind="stable")
        groups = np.split(by_code, np.cumsum(np.bincount(codes))[:-1])
        for frame, rows in zip(frames.dictionary, groups, strict=True):
            alone = rows
            if len(rows) >= FEW:
                alone = self._add_columns(made, frame.as_py(), rows, part["texts"])
            for row in alone.tolist():
                self._add_alone(made, row, frame.as_py(), part["texts"][row].as_py())
        return made

    def _form(self, frame: bytes, texts: pa.ListArray) -> DocumentForm | None:
        if frame not in self._forms:
            # Few data sets have as many.
            if len(self._forms) == N_FORMS:
                self._forms.clear()
            form = self._renderer.build_form(frame)
            if form is not None and not self._fits(form, frame, texts.slice(0, N_TRIED)):
                log.warning("the chat template is applied to each document: its layout varies")
                form = None
            self._forms[frame] = form
        return self._forms[frame]

    def _fits(self, form: DocumentForm, frame: bytes, texts: pa.ListArray) -> bool:
        for own in texts.to_pylist():
            # A form applies only to documents that meet its conditions; others are rendered.
            if not all(condition.holds(own[condition.text]) for condition in form.conditions):
                continue
            body = body_of(frame, own)
            if not self._renderer.has_special_text(body):
                try:
                    if self._renderer.render(body) != form.fill(own):
                        return False
                except Reject:
                    return False
        return True

    def _add_columns(
        self, made: BatchDraft, frame: bytes, rows: NDArray[np.int64], texts: pa.ListArray
    ) -> NDArray[np.int64]:
        """Add documents of one form; return those to render one by one.

        These may contain special tokens, or the template lays them out differently.
        """
        texts = texts.take(pa.array(rows))
        form = self._form(frame, texts)
        if form is None:
            return rows
        flat = texts.flatten()
        # Documents of one frame have equally many texts: text i of each is every n_texts-th from i.
        n_texts = len(flat) // len(texts)
        columns = [flat.take(pa.array(np.arange(i, len(flat), n_texts))) for i in range(n_texts)]
        posing, apart = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        for item in form.items:
            if isinstance(item, Blank):
                pattern = self._renderer.special_pattern(item.writer).pattern
                matches = pc.match_substring_regex(columns[item.text], pattern)
                posing |= matches.to_numpy(zero_copy_only=False)
        made.special_text[rows] = posing
        if self._renderer.layout.text_special_tokens != "plain":
            apart |= posing
        own = {number: columns[number].to_pylist() for number in {c.text for c in form.conditions}}
        for condition in form.conditions:
            apart |= ~np.fromiter(map(condition.holds, own[condition.text]), bool, len(rows))
        if apart.any():
            kept = pa.array(~apart)
            columns = [column.filter(kept) for column in columns]
        made.add_form(rows[~apart], form, columns)
        return rows[apart]

    def _add_alone(self, made: BatchDraft, row: int, frame: bytes, texts: list[str]) -> None:
        assert made.document_ids is not None
        body = body_of(frame, texts)
        made.special_text[row] = self._renderer.has_special_text(body)
        try:
            made.add_document(row, self._renderer.render(body))
        except Reject as reject:
            made.dropped[row] = reject.reason
            example = f"{made.document_ids[row].as_py()}: {reject.reason} ({reject.detail})"
            log.warning("%s", example)
            if len(made.examples) < N_EXAMPLES:
                made.examples.append(example)


class DocumentRows:
    """The kept documents of one split in manifest order, in memory.

    Each is tokenized on access into its own row, cut at the row length: for a trainer run by hand
    without packed rows, and for comparisons.
    """

    def __init__(
        self,
        shards: Sequence[ShardRecord],
        keep: Path,
        *,
        held_out: bool,
        tokenizer: Path,
        layout: Layout,
        length: int,
    ) -> None:
        documents = iter_kept(shards, keep, held_out=held_out)
        self._bodies = [one.body for one in documents for _ in range(one.n_copies)]
        self._renderer = Renderer(layout)
        self._engine = Engine(tokenizer)
        self.length = length

    def __len__(self) -> int:
        return len(self._bodies)

    def take(self, chosen: NDArray[np.integer]) -> PackedRows:
        segments = [self._render(self._bodies[i]) for i in chosen.tolist()]
        tokens = tokenize(segments, self._engine)
        lengths = np.minimum(tokens.ids.lengths, self.length)
        ids_NL = np.full((len(chosen), self.length), PAD_ID, np.int32)
        places = run_indices(np.arange(len(chosen)) * self.length, lengths)
        ids_NL.reshape(-1)[places] = tokens.ids.values[
            run_indices(tokens.ids.offsets[:-1], lengths)
        ]
        starts = np.zeros(len(chosen), np.int64)
        return PackedRows(
            (ids_NL,),
            # One document per row, and none in a row whose document has no tokens.
            Ragged(lengths[lengths > 0].astype(np.int32), offsets_of(np.sign(lengths))),
            clip_spans(tokens.spans, starts, lengths, starts),
        )

    def _render(self, body: Body) -> tuple[Segment, ...]:
        try:
            return self._renderer.render(body)
        except Reject as reject:
            log.warning("%s (%s): a document has no tokens", reject.reason, reject.detail)
            return ()
