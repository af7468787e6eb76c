r"""Apply a model's chat template without letting text pose as markup.

A template returns one string, in which a user's text "<|im_end|>" looks like the end of a turn. So
it is first applied to placeholders, to separate layout from text; the result is cached by chat
shape. Each document is then compared with the template applied to its actual texts: if the template
trims, strips or branches on a text, its own output is used. The learned part of an assistant turn
starts where generation would and ends with the special token that closes the turn. A chat is
rejected if the template silently drops a turn, a call or a tool.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expertflow.core.records import Record
from expertflow.data.records import Body, Layout, Turn
from expertflow.data.reject import Reject
from expertflow.data.traced_text import Condition, Trace, TracedStr, is_traceable, note_reading

# A text's number between two private-use characters.
PLACE = re.compile("\ue0f0([0-9]+)\ue0f1")
MAX_SHAPES = 512
TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
Span = tuple[int, int]


class Atom(Record, frozen=True):
    """A span of a rendered chat: layout, or (``number`` set) one of the chat's nonempty texts."""

    text: str
    learned: bool
    special: bool = False
    number: int | None = None


class ChatTemplate:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        environment = chat_environment()
        self._template = environment.from_string(str(layout.chat_template))
        self._is_traceable = is_traceable(environment, str(layout.chat_template))
        self._trace: Trace | None = None
        self._special = special_pattern(layout.special_tokens)
        self._shape = lru_cache(MAX_SHAPES)(lambda frame: self._lay_out(placeholder_body(frame)))

    def lay_out(self, body: Body) -> tuple[Atom, ...]:
        """Lay out a chat with its texts.

        Reject if the template rejects it, hides the learned part, or rewrites special tokens in a
        text.
        """
        # Imported here, because a benchmark on a bare machine has no orjson.
        from expertflow.data.shapes import frame_of

        frame, texts = frame_of(body)
        filled = tuple(
            atom
            if atom.number is None
            else Atom(texts[atom.number], atom.learned, number=atom.number)
            for atom in self._shape(frame)
        )
        direct = self._apply(body)
        # The template treats these texts as it treated the placeholders.
        if "".join(atom.text for atom in filled) == direct:
            return filled
        if any(self._special.search(text) for text in texts):
            raise Reject("special_token_text", "the chat template rewrites a text with one")
        return self._cut(body, direct)

    def build_form(self, body: Body) -> tuple[tuple[Atom, ...], tuple[Condition, ...]] | None:
        """Lay out a chat of placeholders, with conditions on its texts; None if rewritten."""
        posing = [*_structured_texts(body), *(turn.role for turn in body.turns)]
        if not self._is_traceable or any(PLACE.search(text) for text in posing):
            return None
        self._trace = trace = Trace()
        try:
            atoms = self._lay_out(body)
        except Reject:
            return None
        finally:
            self._trace = None
        return None if trace.opaque else (atoms, tuple(trace.conditions))

    def _lay_out(self, body: Body) -> tuple[Atom, ...]:
        if any(self._special.search(text) for text in _structured_texts(body)):
            raise Reject("special_token_text", "a tool or tool call contains a special token")
        full = self._apply(body)
        _refuse_omissions(full, body)
        return self._cut(body, full)

    def _cut(self, body: Body, full: str) -> tuple[Atom, ...]:
        special = [match.span() for match in self._special.finditer(full)]
        places = {match.span(): int(match[1]) for match in PLACE.finditer(full)}
        learned = [(0, len(full))]
        if not all(turn.learned for turn in body.turns):
            numbers = [i for i, turn in enumerate(body.turns) if turn.learned]
            learned = [self._learned_span(body, i, full, special) for i in numbers]
        edges = {0, len(full), *(edge for s in (*special, *places, *learned) for edge in s)}
        inside = set(special)
        return tuple(
            Atom(
                full[start:end],
                learned=any(low <= start and end <= high for low, high in learned),
                special=(start, end) in inside,
                number=places.get((start, end)),
            )
            for start, end in pairwise(sorted(edges))
        )

    def _learned_span(self, body: Body, i: int, full: str, special: list[Span]) -> Span:
        turn = body.turns[i]
        text_at = full.find(turn.content) if PLACE.fullmatch(turn.content) else -1
        start = text_at
        if turn.role == "assistant":
            # Some templates reject an empty chat, or one that ends in a tool result.
            with contextlib.suppress(Reject):
                # The learned part starts where generation would.
                before = self._apply(body, i, generate=True)
                start = len(before) if full.startswith(before) else start
        if start < 0:
            raise Reject("chat_template", f"the template rewrites turn {i + 1} without marking it")
        # Special tokens within the text do not end the turn.
        behind = max(start, text_at + len(turn.content) if text_at >= 0 else 0)
        ends = [(full[low:high], high) for low, high in special if low >= behind]
        upto = self._apply(body, i + 1)
        if full.startswith(upto):
            ends = [end for end in ends if end[1] <= len(upto)]
            if not ends:
                return start, len(upto)
            usual = [high for token, high in ends if token == self.layout.turn_end]
            # A call may contain special tokens and end in a different one.
            return start, usual[0] if usual else ends[-1][1]
        return start, ends[0][1] if ends else len(full)

    def _apply(self, body: Body, n_turns: int | None = None, *, generate: bool = False) -> str:
        messages = _messages(body.turns[:n_turns])
        if self._trace is not None:
            for message in messages:
                if found := PLACE.fullmatch(message["content"]):
                    message["content"] = TracedStr(found[0], self._trace, int(found[1]))
        try:
            text: str = self._template.render(
                messages=messages,
                tools=list(body.tools) or None,
                # transformers passes this too, as null: templates test whether it is defined.
                documents=None,
                add_generation_prompt=generate,
                bos_token=self.layout.bos or "",
                eos_token=self.layout.eos or "",
            )
        except TEMPLATE_FAULTS as error:
            raise Reject("chat_template", f"the chat template rejects the chat: {error}") from error
        if "\0" in text:
            raise Reject("chat_template", "the chat template writes U+0000; remove it")
        return text


def placeholder_body(frame: bytes) -> Body:
    """Return a frame's body with a placeholder for each text."""
    from expertflow.data.shapes import body_of

    return body_of(frame, [placeholder(i) for i in range(frame.count(b"null"))])


def placeholder(i: int) -> str:
    return f"\ue0f0{i}\ue0f1"


def _refuse_omissions(full: str, body: Body) -> None:
    for i, turn in enumerate(body.turns):
        # A template that skips a role would train on answers to nothing.
        if turn.content not in full:
            raise Reject("chat_template", f"the template leaves out turn {i + 1} ({turn.role})")
        if any(call.name not in full for call in turn.tool_calls):
            raise Reject("chat_template", f"the template leaves out the call in turn {i + 1}")
    for tool in body.tools:
        name = tool.get("function", {}).get("name")
        if isinstance(name, str) and name not in full:
            raise Reject("chat_template", "the template leaves out the tools")


def special_pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Match any special token, longest first; without tokens, match nothing."""
    # "<|end|><" before "<|end|>": the first alternative that matches wins.
    ordered = sorted(filter(None, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or r"[^\s\S]")


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    # Mistral templates require call ids of exactly nine characters.
    messages: list[dict[str, object]] = []
    numbers: dict[str, str] = {}
    waiting: list[str] = []
    n_calls = 0
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.tool_calls:
            message["tool_calls"] = []
        for call in turn.tool_calls:
            number = f"call{n_calls:05d}"
            n_calls += 1
            waiting.append(number)
            if call.id is not None:
                numbers[call.id] = number
            function = {"name": call.name, "arguments": call.arguments}
            message["tool_calls"].append({"id": number, "type": "function", "function": function})
        if turn.role == "tool":
            # A result without a call id answers the first pending call.
            number = numbers.get(turn.tool_call_id or "") or (waiting or ["call00000"])[0]
            if number in waiting:
                waiting.remove(number)
            message["tool_call_id"] = number
            if turn.name is not None:
                message["name"] = turn.name
        messages.append(message)
    return messages


def _structured_texts(body: Body) -> list[str]:
    values: list[Any] = [[c.name, c.arguments] for turn in body.turns for c in turn.tool_calls]
    # A name is written verbatim into the markup, and would be read as markup.
    values += [turn.name for turn in body.turns if turn.name]
    if body.tools:
        values.append(body.tools)
    return [json.dumps(value, ensure_ascii=False) for value in values]


class _Generation(jinja2.ext.Extension):
    # Templates may mark the assistant's text; ignore the marks.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return the template sandbox; without a clock, since a date would change data daily."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    # The parameters of transformers, in its order: templates pass some by position.
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        note_reading(value)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
