"""Lay documents out for the engine: most of them as columns of texts, the others one by one."""

import logging
import re
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from expertflow.core.records import Record
from expertflow.data.reject import Reject
from expertflow.data.render import Blank, Form, Renderer
from expertflow.data.shapes import body_of
from expertflow.tokens.tokenise import BatchDraft

log = logging.getLogger(__name__)
# Frames with fewer documents in a batch than this are rendered one by one.
FEW = 4
N_FORMS = 512
# Documents on which a form is tried before it is believed.
N_TRIED = 16
N_EXAMPLES = 3


class Drafted(Record, frozen=True):
    """Some documents on their way: of each its id, and why it is dropped if it is."""

    draft: BatchDraft
    document_ids: pa.StringArray
    special_text: NDArray[np.bool_]
    dropped: list[str | None]

    def __len__(self) -> int:
        return len(self.dropped)


class Drafter:
    """Renders documents, and keeps count of those that cannot be."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._forms: OrderedDict[bytes, Form | None] = OrderedDict()
        self.n_dropped = 0
        self.dropped_examples: list[str] = []

    def draft(self, part: pa.RecordBatch) -> Drafted:
        """Lay out some documents; those that cannot be rendered get no tokens and a reason.

        Documents of one frame become columns where the layout does not depend on their texts.
        """
        n = part.num_rows
        made = Drafted(BatchDraft(), part["document_id"], np.zeros(n, bool), [None] * n)
        frames = part["frame"].dictionary_encode()
        for frame, rows in zip(frames.dictionary, _groups(frames.indices), strict=True):
            alone = rows
            if len(rows) >= FEW:
                alone = self._add_columns(made, frame.as_py(), rows, part["texts"])
            for row in alone.tolist():
                self._add_alone(made, row, frame.as_py(), part["texts"][row].as_py())
        return made

    def _form(self, frame: bytes, texts: pa.ListArray) -> Form | None:
        """Give the form of a frame, found once and tried on the first documents that have it."""
        if frame not in self._forms:
            if len(self._forms) == N_FORMS:
                self._forms.popitem(last=False)
            form = self._renderer.form(frame)
            if form is not None and not self._fits(form, frame, texts.slice(0, N_TRIED)):
                log.warning("the chat template is applied to every document: its layout differs")
                form = None
            self._forms[frame] = form
        self._forms.move_to_end(frame)
        return self._forms[frame]

    def _fits(self, form: Form, frame: bytes, texts: pa.ListArray) -> bool:
        """Tell whether documents that meet a form's conditions are laid out so by the template."""
        for own in texts.to_pylist():
            if not all(condition.holds(own[condition.text]) for condition in form.conditions):
                continue
            body = body_of(frame, own)
            if not self._renderer.has_special_text(body):
                try:
                    if self._renderer.render(body) != form.filled(own):
                        return False
                except Reject:
                    return False
        return True

    def _add_columns(
        self, made: Drafted, frame: bytes, rows: NDArray[np.int64], texts: pa.ListArray
    ) -> NDArray[np.int64]:
        """Add documents of one form; give those that want to be looked at one by one.

        These are documents that the policy on special tokens may concern, and such as the model's
        template lays out otherwise.
        """
        texts = texts.take(pa.array(rows))
        form = self._form(frame, texts)
        if form is None:
            return rows
        columns = _columns(texts)
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
