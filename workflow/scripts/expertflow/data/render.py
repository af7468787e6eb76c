r"""Render a document as the model reads it: segments of text and special tokens.

Chats use the model's own template (see ``chat_template``) or plain ChatML:

    <|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>\n

Special tokens are inserted by id and the text between them is encoded without any, so that no text
can pose as markup. The text between two special tokens is one segment: split after "assistant\n", a
completion that starts with a newline would get different ids than in the full template.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.data.chat_template import (
    PLACE,
    Atom,
    ChatTemplate,
    placeholder_body,
    special_pattern,
)
from expertflow.data.records import Body, Layout, Segment
from expertflow.data.reject import Reject
from expertflow.data.shapes import last_answer
from expertflow.data.traced_text import Condition

END = Atom("", learned=False, special=True)


class Blank(NamedTuple):
    """A span between two special tokens around one of a document's texts.

    ``writer`` is the text's role, None for plain text. Characters from ``learned_from`` (in
    ``before`` or at its end) onward are learned; None if none are.
    """

    before: str
    text: int
    after: str
    learned_from: int | None
    writer: str | None


class DocumentForm(NamedTuple):
    """The layout of all documents of a frame whose texts meet the conditions."""

    items: tuple[Segment | Blank, ...]
    conditions: tuple[Condition, ...] = ()

    def fill(self, texts: Sequence[str]) -> tuple[Segment, ...]:
        segments = []
        for item in self.items:
            if isinstance(item, Blank):
                text = f"{item.before}{texts[item.text]}{item.after}"
                start = item.learned_from
                item = Segment(text, learned=() if start is None else ((start, len(text)),))
            segments.append(item)
        return tuple(segments)


class Renderer:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._special = special_pattern(layout.special_tokens)
        self._added = special_pattern(layout.special_tokens + layout.added_tokens)
        usable = layout.chat_template is not None and layout.problem is None
        self._template = ChatTemplate(layout) if usable else None

    def render(self, body: Body) -> tuple[Segment, ...]:
        """Render a document; Reject by template or policy, DataError without a template."""
        if self.layout.text_special_tokens == "reject" and self.has_special_text(body):
            raise Reject("special_token_text", "a text contains a special token of the model")
        atoms = self._atoms(body)
        if self.layout.text_special_tokens == "allow":
            atoms = [part for atom in atoms for part in self._split(atom)]
        segments = _join(atoms)
        if self.layout.strip_after or self.layout.strip_before:
            return _strip(segments, self.layout)
        return segments

    def build_form(self, frame: bytes) -> DocumentForm | None:
        """Lay out a frame with blanks; None if the layout depends on the texts."""
        # How much whitespace is swallowed depends on each text.
        if self.layout.strip_after or self.layout.strip_before:
            return None
        body = placeholder_body(frame)
        if body.text is not None:
            return _put_blanks(_join(self._atoms(body)), body)
        found = self._template.build_form(body) if self._template else None
        return found and _put_blanks(_join(found[0]), body, found[1])

    def text(self, body: Body) -> str:
        return "".join(atom.text for atom in self._atoms(body))

    def special_pattern(self, writer: str | None) -> re.Pattern[str]:
        """Match what counts as a special token in a text, by its role; None is a plain text.

        In turns the assistant does not write, any added token counts: such a text imitates the
        markup of a call or a thought, and no tokenizer setting prevents it.
        """
        return self._special if writer in (None, "assistant") else self._added

    def has_special_text(self, body: Body) -> bool:
        if body.text is not None:
            return self._special.search(body.text) is not None
        return any(self.special_pattern(turn.role).search(turn.content) for turn in body.turns)

    def _atoms(self, body: Body) -> Sequence[Atom]:
        if body.text is not None:
            # A plain text is learned with its end token.
            start, end = self.layout.text_start, Atom(self.layout.text_end, True, special=True)
            before = [Atom(start, learned=False, special=True)] if start else []
            return [*before, Atom(body.text, learned=True, number=0), end]
        if self._template is None:
            problem = self.layout.problem or "it has no chat template"
            raise DataError(
                f"the model cannot render chats: {problem}; set data.chat_template to a template"
                " file that can, or to chatml"
            )
        return self._template.lay_out(body)

    def _split(self, atom: Atom) -> Iterator[Atom]:
        end = 0
        for match in self._special.finditer(atom.text if atom.number is not None else ""):
            yield Atom(atom.text[end : match.start()], atom.learned)
            yield Atom(match[0], atom.learned, special=True)
            end = match.end()
        yield replace(atom, text=atom.text[end:])


def _put_blanks(
    segments: tuple[Segment, ...], body: Body, conditions: tuple[Condition, ...] = ()
) -> DocumentForm | None:
    """Turn placeholders into blanks; None if a span has two, or learning ends inside it."""
    writers: list[str | None] = [turn.role for turn in body.turns if turn.content] or [None]
    items: list[Segment | Blank] = []
    for segment in segments:
        places = list(PLACE.finditer(segment.text))
        ends = [end for _, end in segment.learned]
        if len(places) > 1 or ends not in ([], [len(segment.text)]):
            return None
        if not places:
            items.append(segment)
            continue
        number, (low, high) = int(places[0][1]), places[0].span()
        learned_from = segment.learned[0][0] if segment.learned else None
        # Learning starts within or after the text, whose length varies.
        if learned_from is not None and learned_from > low:
            return None
        before, after = segment.text[:low], segment.text[high:]
        items.append(Blank(before, number, after, learned_from, writers[number]))
    return DocumentForm(tuple(items), conditions)


def _join(atoms: Iterable[Atom]) -> tuple[Segment, ...]:
    """Join the atoms between two special tokens."""
    segments: list[Segment] = []
    text, learned = "", list[tuple[int, int]]()
    for atom in (*atoms, END):
        if not atom.special:
            start, text = len(text), text + atom.text
            if atom.learned and atom.text:
                # Learned spans that touch become one.
                if learned and learned[-1][1] == start:
                    start = learned.pop()[0]
                learned.append((start, len(text)))
            continue
        if text:
            segments.append(Segment(text, learned=tuple(learned)))
            text, learned = "", []
        if atom is not END:
            span = ((0, len(atom.text)),) if atom.learned else ()
            segments.append(Segment(atom.text, special=True, learned=span))
    return tuple(segments)


def _strip(segments: tuple[Segment, ...], layout: Layout) -> tuple[Segment, ...]:
    result: list[Segment] = []
    for i, segment in enumerate(segments):
        if segment.special:
            result.append(segment)
            continue
        n = len(segment.text)
        low, high = 0, n
        if i and segments[i - 1].text in layout.strip_after:
            # As in the tokenizer, these tokens swallow adjacent whitespace.
            low = n - len(segment.text.lstrip())
        if i + 1 < len(segments) and segments[i + 1].text in layout.strip_before:
            high = max(low, len(segment.text.rstrip()))
        # Spans move left by what was dropped at the start.
        spans = [(max(a, low) - low, min(b, high) - low) for a, b in segment.learned]
        learned = tuple(span for span in spans if span[0] < span[1])
        if low < high:
            result.append(Segment(segment.text[low:high], learned=learned))
    return tuple(result)


def render_answer(renderer: Renderer, body: Body, text: str | None = None) -> tuple[Segment, ...]:
    """Render a chat up to its last answer (or ``text`` instead); only that is learned."""
    last = last_answer(body)
    turns = [replace(t, learned=i == last) for i, t in enumerate(body.turns[: last + 1])]
    if text is not None:
        turns[last] = replace(turns[last], content=text, tool_calls=())
    return renderer.render(replace(body, turns=tuple(turns)))


def split_question(renderer: Renderer, body: Body) -> tuple[tuple[Segment, ...], str]:
    """Split a chat into the prompt, up to where generation starts, and the expected answer."""
    segments = render_answer(renderer, body)
    turn = body.turns[last_answer(body)]
    at = next(i for i, segment in enumerate(segments) if segment.learned)
    start = segments[at].learned[0][0]
    answer = turn.content
    if turn.tool_calls:
        # The answer is a call as the layout writes it; its last token only ends the turn.
        spans = [s.text[a:b] for s in segments[at:] for a, b in s.learned]
        answer = "".join(spans[:-1]).strip()
    return (*segments[:at], Segment(segments[at].text[:start])), answer


def iter_training_texts(renderer: Renderer, bodies: Iterable[Body]) -> Iterator[str]:
    """Yield texts between special tokens, for training a tokenizer; skip rejected documents."""
    for body in bodies:
        try:
            segments = renderer.render(body)
        except Reject:
            continue
        yield from (segment.text for segment in segments if not segment.special)


def join_question(body: Body) -> str:
    """Return the question in readable form: all before the last learned turn, and the tools."""
    if body.text is not None:
        return body.text
    written, texts = partial(json.dumps, ensure_ascii=False), []
    for turn in body.turns[: last_answer(body)]:
        calls = ({"name": call.name, "arguments": call.arguments} for call in turn.tool_calls)
        texts += [turn.content.strip(), *map(written, calls)]
    return "\n".join(filter(None, [*texts, *map(written, body.tools)]))
