"""Read chat turns in the formats that data sets use.

OpenAI (``role``, ``content`` as text or text parts, ``tool_calls``, the older ``function_call``)
and ShareGPT (``from``, ``value``) are recognized per turn; the manifest maps other key and role
names. Assistant turns are learned unless a turn sets ``train: true | false`` or ``weight: 0 | 1``.
Reasoning (``reasoning_content`` or ``reasoning``) goes before the answer in ``<think>`` tags.
"""

from typing import Any

from expertflow.core.strict_json import parse_json
from expertflow.data.parse import check_value
from expertflow.data.records import Fields, ToolCall, Turn
from expertflow.data.reject import Reject, excerpt
from expertflow.data.settings import SourceSpec

CALL_ROLE = "function_call"
# Notes on accepted chats.
EMPTY_SYSTEM, ASSISTANT_FIRST = "empty_system_turn", "assistant_first"
THOUGHTS = ("reasoning_content", "reasoning")
_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model", CALL_ROLE),
    "tool": ("tool", "function", "observation", "function_response"),
}
ROLES = {name: role for role, names in _NAMES.items() for name in names}


def read_turns(
    record: Fields, source: SourceSpec, *, supervise_all: bool
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """Read a record's chat, with the codes of any notes on it.

    Reject if a turn is malformed or nothing is learned. Empty system turns are dropped.
    """
    name = str(source.messages)
    value = record.get(name)
    # A table's cell may have the chat as JSON text.
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value, name, "no_messages")
        check_value(value, name)
    if not isinstance(value, list) or not value:
        raise Reject("no_messages", "expected a list of turns", field=name, value=value)
    read = [_turn(item, f"{name}.{i}", source, supervise_all) for i, item in enumerate(value)]
    turns = tuple(turn for turn in read if turn.role != "system" or turn.content.strip())
    if not any(turn.learned for turn in turns):
        raise Reject("nothing_to_learn", "no assistant turn is learned", field=name)
    first = next((turn.role for turn in turns if turn.role != "system"), None)
    found = {EMPTY_SYSTEM: len(turns) < len(read), ASSISTANT_FIRST: first == "assistant"}
    return turns, tuple(code for code, is_so in found.items() if is_so)


def read_tools(record: Fields, name: str | None) -> tuple[Fields, ...]:
    """Read a chat's tools, also from JSON text, as ``{"type": "function", "function": {…}}``."""
    value = record.get(name) if name is not None else None
    if value is None:
        return ()
    if isinstance(value, str):
        value = _json(value, str(name), "tools_not_json")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Reject("tools_not_a_list", "expected a list of objects", field=name, value=value)
    check_value(value, str(name))
    return tuple(
        tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool}
        for tool in value
    )


def drop_nulls(value: Any) -> Any:
    """Copy a JSON value without the null keys of objects."""
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return value


def _turn(item: Any, place: str, source: SourceSpec, supervise_all: bool) -> Turn:
    if not isinstance(item, dict):
        raise Reject("turn_not_an_object", "expected an object", field=place, value=item)
    # OpenAI has "role" and "content", ShareGPT "from" and "value".
    stated = item.get(source.role_key or ("role" if "role" in item else "from"))
    role = source.roles.get(str(stated)) or ROLES.get(str(stated))
    if role is None:
        detail = "the role is unknown; map it under roles"
        if stated is None:
            detail = f"no key of {excerpt(list(item))} is a role; set role_key"
        raise Reject("unknown_role", detail, field=place, value=stated)
    key = source.content_key or ("content" if "content" in item else "value")
    if stated == CALL_ROLE and CALL_ROLE not in source.roles:
        calls, content = _calls(item.get(key), place), ""
        if not calls:
            raise Reject(
                "tool_call_without_name", "a call must name its tool", field=f"{place}.{key}"
            )
    else:
        calls = _calls(item.get("tool_calls") or item.get("function_call"), place)
        # A call needs no text, and a result or a system prompt may be blank.
        may_be_empty = bool(calls) or role in ("tool", "system")
        if key not in item and not may_be_empty:
            detail = f"no key of {excerpt(list(item))} is its text; set content_key"
            raise Reject("missing_field", detail, field=f"{place}.{key}")
        content = _content(item.get(key), f"{place}.{key}", may_be_empty=may_be_empty)
    thought = next(filter(item.get, THOUGHTS), None)
    if role == "assistant" and thought:
        thoughts = _content(item[thought], f"{place}.{thought}", may_be_empty=True)
        # The content may already contain its thoughts.
        if thoughts.strip() and "</think>" not in content:
            content = f"<think>\n{thoughts}\n</think>\n\n{content}"
    stated_by = next((key for key in ("train", "weight") if item.get(key) is not None), None)
    learned = item[stated_by] if stated_by else role == "assistant" or supervise_all
    # True and 1.0 equal 1; 0.5 would be half a turn.
    if learned not in (0, 1):
        where = f"{place}.{stated_by}"
        raise Reject(
            "weight_not_0_or_1", "a turn is either learned or not", field=where, value=learned
        )
    return Turn(
        role=role,
        content=content,
        learned=bool(learned),
        tool_calls=calls,
        tool_call_id=_id(item.get("tool_call_id")) if role == "tool" else None,
        name=_id(item.get("name")) if role == "tool" else None,
    )


def _content(value: Any, place: str, *, may_be_empty: bool) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, place) for part in value)
    if may_be_empty and (value is None or (isinstance(value, str) and not value.strip())):
        return value or ""
    return require_text(value, place)


def require_text(value: Any, place: str, fix: str = "") -> str:
    if value is None:
        raise Reject("null_field", f"expected text, but the field is null{fix}", field=place)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise Reject("not_text", f"expected text, found {kind}", field=place, value=value)
    if not value or value.isspace():
        raise Reject("empty_field", f"expected text, but the field is blank{fix}", field=place)
    if "\0" in value:
        raise Reject("nul_character", "the text contains U+0000", field=place, value=value)
    return value


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Reject("part_not_text", f"a part of type {kind!r} is not text", field=place, value=part)


def _calls(value: Any, place: str) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if isinstance(value, str):
        value = _json(value, place, "tool_call_not_json")
    calls = value if isinstance(value, list) else [value]
    return tuple(_call(call, place) for call in calls)


def _call(call: Any, place: str) -> ToolCall:
    # OpenAI nests name and arguments under "function"; others do not.
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Reject("tool_call_without_name", "a call must name its tool", field=place, value=call)
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI passes arguments as JSON text; templates expect the object.
        arguments = _json(arguments or "{}", place, "tool_call_not_json")
    if not isinstance(arguments, dict):
        raise Reject(
            "tool_call_not_json", "arguments must be an object", field=place, value=arguments
        )
    found = ToolCall(name=inner["name"], arguments=arguments, id=_id(call.get("id")))
    check_value([found.name, found.arguments, found.id], place)
    return found


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" else None


def _json(text: str, place: str, reason: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        fix = "; Python printed this, write it with json.dumps" if "'" in text[:3] else ""
        raise Reject(reason, f"{error}{fix}", field=place, value=text) from error
