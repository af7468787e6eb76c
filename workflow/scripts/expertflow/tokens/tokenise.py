r"""Turn rendered documents into token ids and supervised spans, many at a time.

A *piece* is one segment as ids: a special token's one id, or what the engine makes of a text. All
texts go to the engine in one call, and arrays of numbers do the rest: no Python object a token.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from expertflow.core.records import Record
from expertflow.data.records import Segment
from expertflow.data.render import Form
from expertflow.tokens.engine import Encoder
from expertflow.tokens.ragged import Ints, Ragged, offsets_of, runs

# Texts up to this many characters are encoded once a batch: the line end behind every turn.
SHORT_CHARS = 16
NO_EDGE = -1


class TokenBatch(Record, frozen=True):
    """Ids of some documents, and their supervised spans [start, end, start, end ...]."""

    ids: Ragged
    spans: Ragged


class BatchDraft(Struct):
    """Documents being laid out: texts to encode, and which pieces make a document.

    Pieces are numbered from 0 for special tokens, from -1 downwards for texts. A chunk holds the
    numbers of some documents, how many pieces each has, and these pieces. A learned stretch is a
    line of four: document, place of the piece in it, and the texts before its start and its end, by
    number in ``edges``.
    """

    special: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    edges: dict[str, int] = field(default_factory=dict)
    _short: dict[str, int] = field(default_factory=dict)
    _chunks: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)
    _learned: list[Ints] = field(default_factory=list)

    def add(self, number: int, segments: Sequence[Segment]) -> None:
        """Add document ``number``."""
        pieces = [self._piece(segment) for segment in segments]
        learned = [
            [number, i, self._edge(s.text, start), self._edge(s.text, end)]
            for i, s in enumerate(segments)
            for start, end in s.learned
        ]
        self._chunks.append((np.array([number]), np.array([len(pieces)]), np.array(pieces, int)))
        self._learned.append(np.array(learned, int).reshape(-1, 4))

    def add_form(self, numbers: Ints, form: Form, texts: Sequence[pa.StringArray]) -> None:
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
                    # The stretch goes on behind what all of them begin with.
                    start = self._edge(f"{item.before} ", item.learned_from)
            if start is not None:
                line = np.array([0, i, start, NO_EDGE])
                self._learned.append(np.repeat(line[None], n, axis=0))
                self._learned[-1][:, 0] = numbers
        self._chunks.append((numbers, np.full(n, len(form.items)), pieces.reshape(-1)))

    def to_encode(self) -> list[str]:
        """List what the engine is to encode: the texts, then those before edges."""
        return [*self.texts, *self.edges]

    def pieces(self, n_documents: int) -> tuple[Ints, Ints]:
        """Give all pieces in the order of the documents, and where each document's begin."""
        if not self._chunks:
            return np.empty(0, np.int64), np.zeros(n_documents + 1, np.int64)
        numbers, counts, pieces = (np.concatenate(c) for c in zip(*self._chunks, strict=True))
        order = np.argsort(numbers)
        per_document = np.zeros(n_documents, np.int64)
        per_document[numbers] = counts
        laid = pieces[runs(offsets_of(counts)[:-1][order], counts[order])]
        return laid, offsets_of(per_document)

    def learned(self) -> Ints:
        """Give the learned stretches in the order of documents and pieces, [n, 4]."""
        if not self._learned:
            return np.empty((0, 4), np.int64)
        lines = np.concatenate(self._learned)
        return lines[np.lexsort((lines[:, 1], lines[:, 0]))]

    def _piece(self, segment: Segment) -> int:
        text = segment.text
        if segment.special:
            return self.special.setdefault(text, len(self.special))
        if len(text) > SHORT_CHARS:
            self.texts.append(text)
            return ~(len(self.texts) - 1)
        number = self._short.setdefault(text, ~len(self.texts))
        if number == ~len(self.texts):
            self.texts.append(text)
        return number

    def _edge(self, text: str, at: int) -> int:
        """Give a number to the text before a place inside a text; its two ends need none."""
        if at in (0, len(text)):
            return NO_EDGE
        return self.edges.setdefault(text[:at], len(self.edges))


def tokenise(documents: Sequence[Sequence[Segment]], engine: Encoder) -> TokenBatch:
    """Tokenise documents with one call to the engine."""
    draft = BatchDraft()
    for number, document in enumerate(documents):
        draft.add(number, document)
    encoded = engine.encode_flat(draft.to_encode())
    return tokenise_draft(draft, encoded, len(documents), engine)


def tokenise_draft(
    draft: BatchDraft, encoded: Ragged, n_documents: int, engine: Encoder
) -> TokenBatch:
    r"""Put together what was drafted and encoded; documents without a draft get no tokens.

    Of the segment "assistant\nSELECT 1" what stands before the learned stretch is tokenised once
    more by itself, to find the token at which learning starts.
    """
    special = np.array([engine.special_id(token) for token in draft.special], np.int32)
    n_special, n_texts = len(special), len(draft.texts)
    known = Ragged(
        np.concatenate((special, encoded.values)),
        np.concatenate((np.arange(n_special), n_special + encoded.offsets)),
    )
    pieces, document_at = draft.pieces(n_documents)
    laid = known.take(np.where(pieces >= 0, pieces, n_special + ~pieces))
    bounds = laid.offsets[document_at]
    number, place, start, end = draft.learned().T
    at = document_at[number] + place
    own = [known[n_special + n_texts + i] for i in range(len(draft.edges))]
    low = laid.offsets[at] + _leading(start, at, laid, own)
    high = np.where(
        end == NO_EDGE, laid.offsets[at + 1], laid.offsets[at] + _leading(end, at, laid, own)
    )
    kept = low < high
    return TokenBatch(
        Ragged(laid.values, bounds), _by_document(low[kept], high[kept], number[kept], bounds)
    )


def _leading(edge: Ints, at: Ints, laid: Ragged, own: Sequence[np.ndarray]) -> Ints:
    """Count, by piece, the leading ids that belong to the text before an edge alone.

    Usually all of that text's. Where its last characters merge with what follows, the token that
    holds both is the first behind the edge.
    """
    counts = np.zeros(len(at), np.int64)
    order = np.argsort(edge, kind="stable")
    bounds = np.searchsorted(edge[order], np.arange(len(own) + 1))
    for number, ids in enumerate(own):
        members = order[bounds[number] : bounds[number + 1]]
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
    """Give the spans of every document, counted from its start; those that touch are joined."""
    touches = np.zeros(len(low), bool)
    touches[1:] = (low[1:] == high[:-1]) & (document[1:] == document[:-1])
    first = np.flatnonzero(~touches)
    last = np.append(first[1:], len(low)) - 1 if len(first) else first
    document = document[first]
    merged = np.stack((low[first], high[last]), axis=1) - bounds[document][:, None]
    n_spans = np.bincount(document, minlength=len(bounds) - 1)
    return Ragged(merged.reshape(-1).astype(np.int32), offsets_of(2 * n_spans))
