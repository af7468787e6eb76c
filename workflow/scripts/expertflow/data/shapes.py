r"""Turn a raw record into a document's body: chat turns or plain text.

A template such as ``"{schema}\n{question}"`` is filled from the record. ``{a.b}`` reaches into an
object and ``{output.0}`` into a list; ``{context?}`` may be missing or empty, and then the
whitespace before it is dropped; ``{{`` and ``}}`` are braces. Only text fills a placeholder:
converting a number or list would hide a data fault. Other values need a format: ``{document:json}``
writes JSON, ``{options:lines}`` a list of texts by line.

A body is stored in two parts: a frame (the JSON of a ``Body`` with null for each text) and the
texts. Most documents of a source share one frame, so they render as columns of texts.
"""

import copy
import difflib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from msgspec.structs import asdict, replace

from expertflow.core.errors import ConfigError
from expertflow.core.records import to_json
from expertflow.data.messages import read_tools, read_turns, require_text
from expertflow.data.records import Body, Fields, ToolCall, Turn
from expertflow.data.reject import Reject
from expertflow.data.settings import PrepareSpec

TEXT_FRAME = b'{"text":null}'
OPTIONAL = "?"
MISSING = object()
# Limits for listing a record's fields when one is missing.
MAX_NAMES, MAX_NAME_CHARS = 12, 40


class Draft(NamedTuple):
    """A record's texts: the first ``n_given`` are given, the rest are answers.

    ``frame`` and ``contents`` are the body as stored. Records with equal ``group`` text (None: all
    that is given) stay on one side of the split. ``notes`` are codes that are counted.
    """

    texts: tuple[str, ...]
    n_given: int
    frame: bytes
    contents: Sequence[str]
    group: str | None = None
    notes: tuple[str, ...] = ()


def draft_maker(spec: PrepareSpec) -> Callable[[Fields], Draft]:
    source, supervise_all = spec.source, spec.supervise == "all"
    if source.text is not None:
        fill_text = compile_template(source.text)

        def make_text(record: Fields) -> Draft:
            text = fill_text(record)
            return Draft((text,), 0, TEXT_FRAME, (text,))

        return make_text
    system: tuple[Turn, ...] = ()
    if spec.system_prompt is not None:
        system = (Turn(role="system", content=spec.system_prompt, learned=supervise_all),)
    if source.messages is None:
        make_chat_of_lists = draft_maker(replace(spec, source=replace(source, messages="messages")))
        return _pair_maker(spec, system, make_chat_of_lists)

    def make_chat(record: Fields) -> Draft:
        if source.messages not in record:
            raise reject_missing_field(record, str(source.messages))
        turns, notes = read_turns(record, source, supervise_all=supervise_all)
        if turns[0].role != "system":
            turns = (*system, *turns)
        body = Body(turns=turns, tools=read_tools(record, source.tools))
        texts = [_turn_text(turn) for turn in turns]
        n_given = last_answer(body)
        if body.tools:
            texts.insert(0, json.dumps(body.tools, ensure_ascii=False))
            n_given += 1
        return Draft(tuple(texts), n_given, *frame_of(body), _question(body), notes)

    return make_chat


def _pair_maker(
    spec: PrepareSpec, system: tuple[Turn, ...], make_chat: Callable[[Fields], Draft]
) -> Callable[[Fields], Draft]:
    """Draft prompt-completion pairs without building turns: all share one frame."""
    prompt, completion = spec.source.prompt or "", spec.source.completion or ""
    supervise_all = spec.supervise == "all"
    fill_prompt, fill_completion = compile_template(prompt), compile_template(completion)
    user = Turn(role="user", content="-", learned=supervise_all)
    assistant = Turn(role="assistant", content="-", learned=True)
    frame, (*before, _, _) = frame_of(Body(turns=(*system, user, assistant)))

    def make_pair(record: Fields) -> Draft:
        # "{prompt}" -> prompt
        turns, answers = record.get(prompt[1:-1]), record.get(completion[1:-1])
        if isinstance(turns, list) and isinstance(answers, list):
            # TRL's lists of turns; only the completion's are learned.
            mark = {"train": supervise_all}
            turns = [{**mark, **turn} if isinstance(turn, dict) else turn for turn in turns]
            return make_chat({"messages": turns + answers})
        # A template's text is never empty.
        texts = fill_prompt(record), fill_completion(record)
        return Draft(texts, 1, frame, (*before, *texts))

    return make_pair


def last_answer(body: Body) -> int:
    """Return the index of the last learned assistant turn, else of the last learned turn."""
    learned = [i for i, turn in enumerate(body.turns) if turn.learned]
    answers = [i for i in learned if body.turns[i].role == "assistant"]
    return (answers or learned)[-1]


def _question(body: Body) -> str:
    # Its system prompt and later turns often vary between copies of a chat.
    asked = (turn.content for turn in body.turns if turn.role == "user")
    others = (_turn_text(turn) for turn in body.turns if turn.role != "system")
    return next(asked, None) or next(others, None) or _turn_text(body.turns[0])


def _turn_text(turn: Turn) -> str:
    calls = (
        f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in turn.tool_calls
    )
    return "\n".join((turn.content, *calls))


def parse_template(template: str) -> list[tuple[str, str, str]]:
    """Cut a template into literals, each with the field that follows and its format.

    Raises ConfigError if it is malformed.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"template {template!r}: {error}; write a literal brace as {{{{ or }}}}"
        ) from error
    for literal, name, spec, conversion in parts:
        problem = None
        if "\0" in literal:
            problem = "it contains U+0000; remove it"
        elif name == "":
            problem = "a placeholder has no name; write {field}"
        elif conversion is not None:
            problem = f"!{conversion} has no effect; write {{{name}}}"
        elif (spec or "") not in FORMATS:
            problem = f"no format {spec!r}; use {' or '.join(filter(None, FORMATS))}"
        if problem is not None:
            raise ConfigError(f"template {template!r}: {problem}")
    return [(literal, name or "", spec or "") for literal, name, spec, _ in parts]


def compile_template(template: str) -> Callable[[Fields], str]:
    """Compile a template to a function of a record, which raises Reject where text is missing."""
    parts = parse_template(template)
    places = [(literal, name, FORMATS[spec]) for literal, name, spec in parts]
    only = parts[0][1] if parts else ""
    # The usual template, one field alone, needs no formatting.
    if template == f"{{{only}}}" and not only.endswith(OPTIONAL):
        return lambda record: text_field(record, only)
    # Required text is never blank.
    may_be_blank = all(name.endswith(OPTIONAL) for _, name, _ in places if name)

    def fill_places(record: Fields) -> str:
        text = ""
        for literal, name, show in places:
            value = show(record, name) if name else ""
            text += (literal.rstrip() if name and not value else literal) + value
        if may_be_blank and not text.strip():
            raise Reject("empty", f"template {template!r} produces no text")
        return text

    return fill_places


def text_field(record: Fields, name: str) -> str:
    value = record.get(name)
    # The usual case first; all others are handled below.
    if type(value) is str and value and not value.isspace() and "\0" not in value:
        return value
    value = _look_up_named(record, name)
    if name.endswith(OPTIONAL) and value in (None, ""):
        return ""
    path = name.removesuffix(OPTIONAL)
    if isinstance(value, int | float | list | dict):
        ways = f"in a template, {{{name}:json}} writes it"
        if isinstance(value, list | dict):
            key = "0" if isinstance(value, list) else next(iter(value), "key")
            ways += f", {{{path}.{key}}} reaches into it"
        detail = f"expected text, found {type(value).__name__}; {ways}"
        raise Reject("not_text", detail, field=path, value=value)
    return require_text(value, path, f"; write {name}? if it may be empty" if path == name else "")


def json_field(record: Fields, name: str) -> str:
    value = _look_up_named(record, name)
    if name.endswith(OPTIONAL) and value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Reject("not_json", str(error), field=name.removesuffix(OPTIONAL)) from error


def lines_field(record: Fields, name: str) -> str:
    value, path = _look_up_named(record, name), name.removesuffix(OPTIONAL)
    if name.endswith(OPTIONAL) and not value:
        return ""
    if not isinstance(value, list) or not value:
        raise Reject("not_a_list", "expected a list of texts", field=path, value=value)
    return "\n".join(require_text(item, f"{path}.{i}") for i, item in enumerate(value))


def _look_up_named(record: Fields, name: str) -> Any:
    path = name.removesuffix(OPTIONAL)
    value = look_up(record, path)
    if value is MISSING and path == name:
        raise reject_missing_field(record, path)
    # A column has null where other rows have an optional field.
    return None if value is MISSING else value


FORMATS: dict[str, Callable[[Fields, str], str]] = {
    "": text_field,
    "json": json_field,
    "lines": lines_field,
}


def reject_missing_field(record: Fields, path: str) -> Reject:
    outer, (first, _, inner) = "it", path.partition(".")
    while inner and isinstance(record.get(first), dict):
        outer, record, (first, _, inner) = repr(first), record[first], inner.partition(".")
    names = [str(name) for name in record]
    near = difflib.get_close_matches(first, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if first in record:
        kind = "null" if record[first] is None else type(record[first]).__name__
        hint = f"its {first!r} is {kind}; "
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and first in value[0]:
            # One object around all records, as in {"data": [{…}, …]}.
            hint = f"write the objects of {name!r} one per line, e.g. jq -c '.{name}[]'; "
    shown = [name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…" for name in names]
    listed = ", ".join(shown[:MAX_NAMES]) + (", …" if len(shown) > MAX_NAMES else "")
    words = f"the record has no field {path!r}; {hint}{outer} has {listed or 'none'}"
    return Reject("missing_field", words, field=path)


def frame_of(body: Body) -> tuple[bytes, tuple[str, ...]]:
    """Split a body into frame and nonempty texts; equal bodies have equal frames."""
    if body.text is not None:
        return TEXT_FRAME, (body.text,)
    turns = [asdict(turn) | {"content": None if turn.content else ""} for turn in body.turns]
    for turn in turns:
        # Few turns have one: frames without it stay as they were before names were added.
        if turn["name"] is None:
            del turn["name"]
    texts = tuple(turn.content for turn in body.turns if turn.content)
    return orjson.dumps({"turns": turns, "tools": body.tools}, default=to_json), texts


def body_of(frame: bytes, texts: Sequence[str]) -> Body:
    value = orjson.loads(frame)
    if "text" in value:
        return Body(text=texts[0])
    # Texts are in the order of the nulls.
    left = iter(texts)
    for turn in value["turns"]:
        turn["content"] = next(left) if turn["content"] is None else ""
        turn["tool_calls"] = tuple(ToolCall(**call) for call in turn["tool_calls"])
    return Body(turns=tuple(Turn(**t) for t in value["turns"]), tools=tuple(value["tools"]))


def look_up(record: Fields, path: str) -> Any:
    """Return the value at a field name or dotted path; ``MISSING`` if none."""
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def with_value(record: Fields, path: str, value: Any) -> Fields:
    """Copy a record with another value at a path that ``look_up`` finds."""
    result = copy.deepcopy(record)
    box: Any = result
    *outer, last = [path] if path in record else path.split(".")
    for part in outer:
        box = box[int(part) if isinstance(box, list) else part]
    box[int(last) if isinstance(box, list) else last] = value
    return result
