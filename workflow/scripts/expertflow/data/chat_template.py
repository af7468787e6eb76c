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
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.data.records import Body, Layout, Turn
from expertflow.data.reject import Reject
from expertflow.data.traced_text import Condition, Trace, TracedStr, is_traceable, note_reading

# A turn number between two private-use characters.
PLACE = re.compile("\ue0f0([0-9]+)\ue0f1")
MAX_SHAPES = 512
TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, KeyError, IndexError, ValueError, AttributeError,
)  # fmt: skip
Span = tuple[int, int]


class Atom(Record, frozen=True):
    """A span of a rendered chat: layout, or (``turn`` set) a turn's text."""

    text: str
    learned: bool
    special: bool = False
    turn: int | None = None


class ChatTemplate:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        environment = chat_environment()
        self._template = environment.from_string(str(layout.chat_template))
        self._is_traceable = is_traceable(environment, str(layout.chat_template))
        self._trace: Trace | None = None
        self._special = special_pattern(layout.special_tokens)
        self._shapes: OrderedDict[str, tuple[Atom, ...]] = OrderedDict()

    def atoms(self, body: Body) -> tuple[Atom, ...]:
        """Lay out a chat with its texts.

        Reject if the template refuses it, hides the learned part, or rewrites special tokens in a
        text.
        """
        shape = self._shape(body)
        filled = tuple(
            atom
            if atom.turn is None
            else Atom(body.turns[atom.turn].content, atom.learned, turn=atom.turn)
            for atom in shape
        )
        direct = self._apply(body.turns, body.tools)
        if "".join(atom.text for atom in filled) == direct:
            return filled
        texts = [turn.content for turn in body.turns]
        if any(self._special.search(text) for text in texts):
            raise Reject("special_token_text", "a text that the chat template rewrites holds one")
        return self._cut(body.turns, body.tools, direct)

    def form(self, body: Body) -> tuple[tuple[Atom, ...], tuple[Condition, ...]] | None:
        """Lay out a chat of placeholders, with conditions on its texts; None if rewritten."""
        posing = [*_structured_texts(body.turns, body.tools), *(turn.role for turn in body.turns)]
        if not self._is_traceable or any(PLACE.search(text) for text in posing):
            return None
        self._trace = trace = Trace()
        try:
            atoms = self._lay_out(body.turns, body.tools)
        except Reject:
            return None
        finally:
            self._trace = None
        return None if trace.opaque else (atoms, tuple(trace.conditions))

    def _lay_out(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> tuple[Atom, ...]:
        if any(self._special.search(text) for text in _structured_texts(turns, tools)):
            raise Reject("special_token_text", "a tool or a call to one holds a special token")
        full = self._apply(turns, tools)
        _refuse_omissions(full, turns, tools)
        return self._cut(turns, tools, full)

    def _shape(self, body: Body) -> tuple[Atom, ...]:
        turns = [
            replace(turn, content=place(i) if turn.content else "")
            for i, turn in enumerate(body.turns)
        ]
        key = repr((turns, body.tools))
        if key not in self._shapes:
            if len(self._shapes) == MAX_SHAPES:
                self._shapes.popitem(last=False)
            self._shapes[key] = self._lay_out(turns, body.tools)
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _cut(
        self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]], full: str
    ) -> tuple[Atom, ...]:
        special = [match.span() for match in self._special.finditer(full)]
        places = {match.span(): int(match[1]) for match in PLACE.finditer(full)}
        if all(turn.learned for turn in turns):
            learned = [(0, len(full))]
        else:
            learned = [
                self._learned_span(turns, i, tools, full, special)
                for i, turn in enumerate(turns)
                if turn.learned
            ]
        edges = {0, len(full), *(e for s in (*special, *places, *learned) for e in s)}
        ends = sorted(edges)
        inside = set(special)
        return tuple(
            Atom(
                full[start:end],
                learned=any(low <= start and end <= high for low, high in learned),
                special=(start, end) in inside,
                turn=places.get((start, end)),
            )
            for start, end in pairwise(ends)
        )

    def _learned_span(
        self,
        turns: Sequence[Turn],
        i: int,
        tools: Sequence[dict[str, Any]],
        full: str,
        special: list[Span],
    ) -> Span:
        text_at = full.find(turns[i].content) if PLACE.fullmatch(turns[i].content) else -1
        start = text_at
        if turns[i].role == "assistant":
            # Some templates refuse an empty chat, or one that ends in a tool result.
            with contextlib.suppress(Reject):
                before = self._apply(turns[:i], tools, generate=True)
                start = len(before) if full.startswith(before) else start
        if start < 0:
            raise Reject("chat_template", f"the template rewrites turn {i + 1}; nothing marks it")
        behind = max(start, text_at + len(turns[i].content) if text_at >= 0 else 0)
        ends = [(full[low:high], high) for low, high in special if low >= behind]
        upto = self._apply(turns[: i + 1], tools)
        if full.startswith(upto):
            ends = [end for end in ends if end[1] <= len(upto)]
            if not ends:
                return start, len(upto)
            usual = [high for token, high in ends if token == self.layout.turn_end]
            # A call may contain special tokens and end in a different one.
            return start, usual[0] if usual else ends[-1][1]
        return start, ends[0][1] if ends else len(full)

    def _apply(
        self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]], *, generate: bool = False
    ) -> str:
        messages = _messages(turns)
        if self._trace is not None:
            for message in messages:
                if found := PLACE.fullmatch(message["content"]):
                    message["content"] = TracedStr(found[0], self._trace, int(found[1]))
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                bos_token=self.layout.bos or "",
                eos_token=self.layout.eos or "",
            )
        except TEMPLATE_FAULTS as error:
            raise Reject("chat_template", f"the chat template refuses the chat: {error}") from error


def place(i: int) -> str:
    return f"\ue0f0{i}\ue0f1"


def _refuse_omissions(full: str, turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> None:
    for i, turn in enumerate(turns):
        if turn.content not in full:
            raise Reject("chat_template", f"the template leaves out turn {i + 1} ({turn.role})")
        for call in turn.tool_calls:
            if call.name not in full:
                raise Reject("chat_template", f"the template leaves out the call in turn {i + 1}")
    for tool in tools:
        name = tool.get("function", {}).get("name")
        if isinstance(name, str) and name not in full:
            raise Reject("chat_template", "the template leaves out the tools")


def special_pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Match any special token, longest first; without tokens, match nothing."""
    ordered = sorted(filter(None, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return messages with nine-character call ids, as some templates require."""
    messages: list[dict[str, Any]] = []
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
            number = numbers.get(turn.tool_call_id or "") or (waiting or ["call00000"])[0]
            if number in waiting:
                waiting.remove(number)
            message["tool_call_id"] = number
        messages.append(message)
    return messages


def _structured_texts(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> list[str]:
    calls = [call for turn in turns for call in turn.tool_calls]
    texts = [json.dumps([call.name, call.arguments], ensure_ascii=False) for call in calls]
    return [*texts, json.dumps(tools, ensure_ascii=False)] if tools else texts


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

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        note_reading(value)
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
