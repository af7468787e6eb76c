"""Lay documents out for the engine: most of them as columns of texts, the others one by one."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from expertflow.data.documents import body_of
from expertflow.data.reject import Reject
from expertflow.data.render import Blank, Form, Renderer
from expertflow.tokens.tokenise import Draft

log = logging.getLogger(__name__)
# Frames with fewer documents in a batch than this are rendered one by one.
FEW = 4
N_FORMS = 512
N_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Drafted:
    """Some documents on their way: of each its id, and why it is dropped if it is."""

    draft: Draft
    document_ids: pa.StringArray
    special_text: NDArray[np.bool_]
    dropped: list[str | None]

    def __len__(self) -> int:
        return len(self.dropped)


class Drafter:
    """Renders documents, and keeps count of those that cannot be."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._form = lru_cache(N_FORMS)(renderer.form)
        self.n_dropped = 0
        self.dropped_examples: list[str] = []

    def draft(self, part: pa.RecordBatch) -> Drafted:
        """Lay out some documents; those that cannot be rendered get no tokens and a reason.

        Documents of one frame become columns where the layout does not depend on their texts.
        """
        n = part.num_rows
        made = Drafted(Draft(), part["document_id"], np.zeros(n, bool), [None] * n)
        frames = part["frame"].dictionary_encode()
        for frame, rows in zip(frames.dictionary, _groups(frames.indices), strict=True):
            form = self._form(frame.as_py()) if len(rows) >= FEW else None
            alone = rows if form is None else self._add_columns(made, form, rows, part["texts"])
            for row in alone.tolist():
                self._add_alone(made, row, frame.as_py(), part["texts"][row].as_py())
        return made

    def _add_columns(
        self, made: Drafted, form: Form, rows: NDArray[np.int64], texts: pa.ListArray
    ) -> NDArray[np.int64]:
        """Add documents of one form; give those that want to be looked at one by one.

        These are documents that the policy on special tokens may concern, and such as the model's
        template lays out otherwise.
        """
        columns = _columns(texts.take(pa.array(rows)))
        posing = self._posing(form, columns, len(rows))
        made.special_text[rows] = posing
        apart = _otherwise(form, columns, len(rows))
        if self._renderer.layout.text_special_tokens != "plain":
            apart |= posing
        if apart.any():
            kept = pa.array(~apart)
            columns = [column.filter(kept) for column in columns]
        made.draft.add_form(rows[~apart], form, columns)
        return rows[apart]

    def _add_alone(self, made: Drafted, row: int, frame: bytes, texts: list[str]) -> None:
        body = body_of(frame, texts)
        made.special_text[row] = self._renderer.has_special_text(body)
        try:
            made.draft.add(row, self._renderer.render(body))
        except Reject as reject:
            made.dropped[row] = reject.reason
            self.n_dropped += 1
            said = f"{made.document_ids[row].as_py()}: {reject.reason} ({reject.detail})"
            log.warning("%s", said)
            if len(self.dropped_examples) < N_EXAMPLES:
                self.dropped_examples.append(said)

    def _posing(self, form: Form, columns: Sequence[pa.StringArray], n: int) -> NDArray[np.bool_]:
        """Tell which documents hold in a text what is a special token to the model."""
        found = np.zeros(n, bool)
        for item in form.items:
            if isinstance(item, Blank) and (names := self._renderer.special_in(item.writer)):
                pattern = "|".join(map(re.escape, names))
                matches = pc.match_substring_regex(columns[item.text], pattern)
                found |= matches.to_numpy(zero_copy_only=False)
        return found


def _otherwise(form: Form, columns: Sequence[pa.StringArray], n: int) -> NDArray[np.bool_]:
    """Tell which documents do not meet the conditions of their form."""
    apart = np.zeros(n, bool)
    for number, column in enumerate(columns):
        conditions = [c for c in form.conditions if c.text == number]
        if conditions:
            texts = column.to_pylist()
            for condition in conditions:
                apart |= ~np.fromiter(map(condition.holds, texts), bool, n)
    return apart


def _groups(codes: pa.Array) -> list[NDArray[np.int64]]:
    """List the rows of each code, in their order."""
    values = codes.to_numpy()
    order = np.argsort(values, kind="stable")
    return np.split(order, np.cumsum(np.bincount(values))[:-1])


def _columns(texts: pa.ListArray) -> list[pa.StringArray]:
    """Turn lists of equally many texts into columns."""
    flat = texts.flatten()
    n = len(flat) // len(texts)
    return [flat.take(pa.array(np.arange(i, len(flat), n))) for i in range(n)]
