r"""Turn a raw record into a document: segments of text, some of which the model learns to write.

The chat layout is ChatML, as Qwen models use it:

    <|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>\n

The marks are special tokens and are spliced by id; the text between them is encoded with special
tokens off, so that nothing in the data can pose as a mark. A role and its text are one segment:
split after "assistant\n", a completion that starts with a newline would get other ids than the
template as a whole gives.
"""

import json
import string
from collections.abc import Iterable, Mapping
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.data.records import PrepareSpec, Segment

TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ROLES = {"system", "user", "assistant", "tool"}


class Reject(Exception):
    """A record that cannot become a document. Carries the reason under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def render(record: Mapping[str, Any], spec: PrepareSpec) -> tuple[Segment, ...]:
    """Render one record by the template that its source names.

    Raises:
        Reject: a field is missing, empty, or no text.
    """
    source = spec.source
    if source.text is not None:
        return render_text(fill(source.text, record))
    if source.messages is not None:
        messages = messages_of(record, source.messages)
    else:
        messages = [
            ("user", fill(source.prompt or "", record)),
            ("assistant", fill(source.completion or "", record)),
        ]
    if spec.system_prompt is not None and messages[0][0] != "system":
        messages = [("system", spec.system_prompt), *messages]
    return render_chat(messages, supervise_all=spec.supervise == "all")


def render_text(text: str) -> tuple[Segment, ...]:
    """Render plain text: all of it is learned, and its end too."""
    return (
        Segment(text=text, supervised=True),
        Segment(text=TEXT_END, special=True, supervised=True),
    )


def render_chat(messages: Iterable[tuple[str, str]], *, supervise_all: bool) -> tuple[Segment, ...]:
    """Render (role, text) turns; learned are the assistant's texts and their end marks."""
    segments: list[Segment] = []
    for role, text in messages:
        learned = role == "assistant" or supervise_all
        header = f"{role}\n"
        segments += [
            Segment(text=TURN_START, special=True),
            Segment(text=header + text, supervised=learned, n_header_chars=len(header)),
            Segment(text=TURN_END, special=True, supervised=learned),
            Segment(text="\n"),
        ]
    return tuple(segments)


def question_of(segments: tuple[Segment, ...]) -> tuple[tuple[Segment, ...], str]:
    """Split a document into what the model is given and what it should write last.

    The question ends after the header of the last learned text, as generation starts there.
    """
    last = max(i for i, s in enumerate(segments) if s.supervised and not s.special)
    answer = segments[last]
    header = Segment(text=answer.text[: answer.n_header_chars])
    return (*segments[:last], header), answer.text[answer.n_header_chars :]


def question_text(segments: tuple[Segment, ...]) -> str:
    """Give the question as a person reads it: the texts without marks, headers and blanks."""
    question, _ = question_of(segments)
    texts = [s.text[s.n_header_chars :].strip() for s in question[:-1] if not s.special]
    return "\n".join(text for text in texts if text)


def fill(template: str, record: Mapping[str, Any]) -> str:
    """Fill ``{field}`` places with the record's texts; ``{{`` and ``}}`` stand for braces.

    Nothing but text is accepted: a number or a list under a text field is a fault of the data that
    turning it into a string would hide.
    """
    parts: list[str] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append(literal)
        if name is not None:
            parts.append(_text_field(record, name))
    result = "".join(parts)
    if not result.strip():
        raise Reject("empty", f"template {template!r} gives no text")
    return result


def template_fields(template: str) -> list[str]:
    """List the fields that a template needs.

    Raises:
        ConfigError: the braces do not match.
    """
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"template {template!r}: {error}; write a brace of the text as {{{{ or }}}}"
        ) from error


def messages_of(record: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """Read OpenAI-style turns: a list of objects with ``role`` and ``content``."""
    value = record.get(name)
    if not isinstance(value, list) or not value:
        raise Reject("no_messages", f"field {name!r} is not a list of turns")
    messages = []
    for turn in value:
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ROLES:
            raise Reject("unknown_role", f"role {role!r} in {name!r}")
        messages.append((str(role), _text_field(turn, "content")))
    if not any(role == "assistant" for role, _ in messages):
        raise Reject("no_assistant_turn", f"nothing to learn in {name!r}")
    return messages


def segments_to_rows(segments: tuple[Segment, ...]) -> list[dict[str, Any]]:
    """Lay segments out as Arrow struct values."""
    return [
        {
            "text": s.text,
            "special": s.special,
            "supervised": s.supervised,
            "n_header_chars": s.n_header_chars,
        }
        for s in segments
    ]


def segments_from_rows(rows: list[dict[str, Any]]) -> tuple[Segment, ...]:
    """Read segments back from Arrow struct values."""
    return tuple(Segment(**row) for row in rows)


def plain_text(segments: tuple[Segment, ...]) -> str:
    """Join all segments, marks included: the text whose hash identifies a document."""
    return "".join(segment.text for segment in segments)


def _text_field(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        raise Reject("missing_field", f"field {name!r}")
    value = record[name]
    if value is None:
        raise Reject("null_field", f"field {name!r}")
    if not isinstance(value, str):
        raise Reject("not_text", f"field {name!r} is {json.dumps(value, default=str)[:60]}")
    if not value.strip():
        raise Reject("empty_field", f"field {name!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Reject("lone_surrogate", f"field {name!r}") from error
    return value
