"""Turn segments of text into token ids and supervised spans."""

from collections.abc import Sequence
from dataclasses import dataclass

from expertflow.data.records import Segment
from expertflow.tokens.engine import Engine


@dataclass(frozen=True, slots=True)
class TokenisedDocument:
    """Ids of one document, and its supervised tokens as flat spans [start, end, start, end ...]."""

    ids: list[int]
    spans: list[int]

    @property
    def n_supervised(self) -> int:
        """Count the supervised tokens."""
        return sum(self.spans[1::2]) - sum(self.spans[::2])


def tokenise(documents: Sequence[tuple[Segment, ...]], engine: Engine) -> list[TokenisedDocument]:
    r"""Tokenise many documents with one call to the engine.

    Of the segment "assistant\nSELECT 1" what stands before the learned stretch is tokenised once
    more by itself, to find the token at which learning starts.
    """
    encoded = iter(engine.encode([s.text for d in documents for s in d if not s.special]))
    edges = sorted({text for d in documents for s in d for text in _edges(s)})
    known = dict(zip(edges, engine.encode(edges), strict=True)) if edges else {}
    special: dict[str, int] = {}
    result = []
    for document in documents:
        ids: list[int] = []
        spans: list[int] = []
        for segment in document:
            if segment.special:
                if segment.text not in special:
                    special[segment.text] = engine.special_id(segment.text)
                piece = [special[segment.text]]
            else:
                piece = next(encoded)
            for start, end in segment.learned:
                low = _token_at(segment.text[:start], piece, known) if start else 0
                whole = end == len(segment.text)
                high = len(piece) if whole else _token_at(segment.text[:end], piece, known)
                _add_span(spans, len(ids) + low, len(ids) + high)
            ids += piece
        result.append(TokenisedDocument(ids, spans))
    return result


def _edges(segment: Segment) -> list[str]:
    """List what stands before each edge of a learned stretch inside the segment's text."""
    n = len(segment.text)
    return [segment.text[:at] for span in segment.learned for at in span if 0 < at < n]


def _token_at(before: str, ids: list[int], known: dict[str, list[int]]) -> int:
    """Count the leading ids that belong to the text before an edge alone.

    Usually all of that text's. Where its last characters merge with what follows, the token that
    holds both is the first behind the edge.
    """
    own = known[before]
    n = 0
    while n < min(len(own), len(ids)) and own[n] == ids[n]:
        n += 1
    return n


def _add_span(spans: list[int], start: int, end: int) -> None:
    """Add a span, joined to the one before it where they touch."""
    if start >= end:
        return
    if spans and spans[-1] == start:
        spans[-1] = end
    else:
        spans += [start, end]
