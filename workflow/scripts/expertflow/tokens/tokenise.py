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

    Of the segment "assistant\nSELECT 1" only what follows its header is supervised.
    """
    texts = [s.text for d in documents for s in d if not s.special]
    headers = sorted({s.text[: s.n_header_chars] for d in documents for s in d if s.n_header_chars})
    header_ids = dict(zip(headers, engine.encode(headers), strict=True)) if headers else {}
    encoded = iter(engine.encode(texts))
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
            if segment.supervised:
                header = header_ids.get(segment.text[: segment.n_header_chars], [])
                _add_span(spans, len(ids) + _shared_prefix(header, piece), len(ids) + len(piece))
            ids += piece
        result.append(TokenisedDocument(ids, spans))
    return result


def _shared_prefix(header: list[int], ids: list[int]) -> int:
    """Count the leading ids that belong to the header alone.

    Usually all of the header's. Where the text's first characters merge into the header's last
    token, that token is the first one that is learned.
    """
    n = 0
    while n < min(len(header), len(ids)) and header[n] == ids[n]:
        n += 1
    return n


def _add_span(spans: list[int], start: int, end: int) -> None:
    """Add a span, joined to the one before it where they touch."""
    if start == end:
        return
    if spans and spans[-1] == start:
        spans[-1] = end
    else:
        spans += [start, end]
