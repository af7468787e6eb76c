"""From a record to turns: templates, and the formats in which chats are stored."""

import json
import re
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace
from support import turn

from expertflow.core.errors import ConfigError
from expertflow.data.records import Body, ToolCall
from expertflow.data.reject import Reject
from expertflow.data.settings import PrepareSpec, SourceSpec
from expertflow.data.shapes import body_of as put_together
from expertflow.data.shapes import compile_template, draft_maker, frame_of, parse_template

SPEC = PrepareSpec(
    source=SourceSpec(name="s", kind="local", prompt="{q}", completion="{a}"),
    system_prompt=None, supervise="completion", evaluation_fields=(), on_reject="skip",
    near=None, benchmarks=(),
)  # fmt: skip


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": " "}
CALL = '{"name": "f", "arguments": {"x": 1}}'
CHAT = SourceSpec(name="s", kind="local", messages="turns", tools="tools")


def chat_of(turns: Any, *, tools: Any = None, **source: Any) -> Body:
    return body_of(replace(SPEC, source=replace(CHAT, **source)), {"turns": turns, "tools": tools})


def body_of(spec: PrepareSpec, record: dict[str, Any]) -> Body:
    draft = draft_maker(spec)(record)
    return put_together(draft.frame, draft.contents)


def test_templates_make_a_question_and_an_answer_or_a_plain_document() -> None:
    body = body_of(replace(SPEC, system_prompt="be kind"), {"q": "ask", "a": "tell"})
    assert body.turns == (turn("system", "be kind"), turn("user", "ask"), turn("assistant", "tell"))
    source = SourceSpec(name="s", kind="local", text="# {title}\n{body}")
    body = body_of(replace(SPEC, source=source), {"title": "T", "body": "B"})
    assert body == Body(text="# T\nB")


@pytest.mark.parametrize(
    ("template", "record", "text"),
    [
        ("{a}", {"a": "x"}, "x"),
        ("{a} {{b}}", {"a": "x"}, "x {b}"),
        ("{a.b.1}", {"a": {"b": ["x", "y"]}}, "y"),
        ("{a.b}", {"a.b": "whole name first", "a": {"b": "x"}}, "whole name first"),
        ("{a}{b?}", {"a": "x"}, "x"),
        ("{a}\n{b?}", {"a": "x ", "b": None}, "x "),
        ("{a} {b?}\n{c?}!", {"a": "x", "b": "", "c": "y"}, "x\ny!"),
        ("{a}\n{b?}", {"a": "x", "b": "y"}, "x\ny"),
        ("{a:json}", {"a": {"é": [1, None]}}, '{"é": [1, null]}'),
        ("{a:lines}", {"a": ["x", "y"]}, "x\ny"),
        ("x{a?:lines}{b?:json}{c?:json}", {"a": [], "c": None}, "x"),
    ],
)
def test_places_of_a_template(template: str, record: dict[str, Any], text: str) -> None:
    assert compile_template(template)(record) == text


@pytest.mark.parametrize(
    ("template", "record", "reason", "field"),
    [
        ("{a}", {}, "missing_field", "a"),
        ("{a}", {"a": None}, "null_field", "a"),
        ("{a}", {"a": 3}, "not_text", "a"),
        ("{a}", {"a": " \n"}, "empty_field", "a"),
        ("{a}", {"a": "x\0y"}, "nul_character", "a"),
        ("{a.b}", {"a": {}}, "missing_field", "a.b"),
        ("{a.1}", {"a": ["x"]}, "missing_field", "a.1"),
        ("{a}{b?}", {"a": "x", "b": 3}, "not_text", "b"),
        ("{a?}", {}, "empty", None),
        ("{a:json}", {}, "missing_field", "a"),
        ("{a:lines}", {"a": "x"}, "not_a_list", "a"),
        ("{a:lines}", {"a": ["x", 3]}, "not_text", "a.1"),
        ("{a:json}", {"a": [datetime(2024, 1, 1)]}, "not_json", "a"),
        ("{a:json}", {"a": {"b": Decimal(1)}}, "not_json", "a"),
        ("{a?:json}", {"a": float("nan")}, "not_json", "a"),
    ],
)
def test_what_no_template_accepts(
    template: str, record: dict[str, Any], reason: str, field: str | None
) -> None:
    with pytest.raises(Reject) as caught:
        compile_template(template)(record)
    assert (caught.value.reason, caught.value.field) == (reason, field)


@pytest.mark.parametrize(("supervise", "learned"), [("completion", False), ("all", True)])
def test_lists_of_turns_as_prompt_and_completion_make_a_chat(supervise: str, learned: bool) -> None:
    said = [turn(role, role) for role in ("system", "user", "assistant", "user", "assistant")]
    rows = [{"role": one.role, "content": one.content} for one in said]
    body = body_of(replace(SPEC, supervise=supervise), {"q": rows[:4], "a": rows[4:]})
    assert body.turns == (*(replace(one, learned=learned) for one in said[:4]), said[4])
    with pytest.raises(Reject, match="expected an object"):
        body_of(SPEC, {"q": ["x"], "a": rows[4:]})


@pytest.mark.parametrize("template", ["{a", "a}", "{}", "{a:xml}", "{a!r}", "{a}\0"])
def test_a_malformed_template_is_rejected(template: str) -> None:
    with pytest.raises(ConfigError, match="template"):
        parse_template(template)


ASKED, ANSWERED = turn("user", "a"), turn("assistant", "b")
SHAREGPT = {"human": "a", "function_call": CALL, "observation": "2", "gpt": "b"}
CALLED = {"from": "function_call", "value": CALL}


@pytest.mark.parametrize(
    ("turns", "source", "wanted"),
    [
        (
            [{"role": "developer", "content": "be kind"},
             {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
             {"role": "assistant", "content": "b"}],
            {}, (turn("system", "be kind"), turn("user", "ab"), ANSWERED),
        ),
        # As a cell of a table.
        (f" {json.dumps([USER, ANSWER])}", {}, (ASKED, ANSWERED)),
        (
            [{"from": name, "value": value} for name, value in SHAREGPT.items()],
            {}, (ASKED, turn("assistant", tool_calls=(ToolCall(name="f", arguments={"x": 1}),)),
                 turn("tool", "2"), ANSWERED),
        ),
        # A call is a call unless its role is mapped.
        ([CALLED], {"roles": {"function_call": "assistant"}}, (turn("assistant", CALL),)),
        (
            [{"speaker": "USER", "utterance": "a"}, {"speaker": "SYSTEM", "utterance": "b"}],
            {"role_key": "speaker", "content_key": "utterance",
             "roles": {"USER": "user", "SYSTEM": "assistant"}},
            (ASKED, ANSWERED),
        ),
        # A turn may set whether it is learned.
        (
            [{**USER, "train": True}, {**ANSWER, "weight": 0}, {**ANSWER, "weight": 1}],
            {}, (replace(ASKED, learned=True), replace(ANSWERED, learned=False), ANSWERED),
        ),
    ],
)  # fmt: skip
def test_turns_come_in_several_shapes(turns: Any, source: dict[str, Any], wanted: Any) -> None:
    assert chat_of(turns, **source).turns == wanted


def test_tool_calls_as_text_or_object() -> None:
    arguments = {"x": [-(1 << 63), (1 << 64) - 1, "é"]}
    for given in (arguments, json.dumps(arguments)):
        inner = {"name": "f", "arguments": given}
        for key, call, number in (
            ("tool_calls", [{"id": "1", "function": inner}], "1"),
            ("function_call", inner, None),
        ):
            answer = answer_of(content=None, **{key: call})
            assert answer.tool_calls == (ToolCall(name="f", arguments=arguments, id=number),)


def test_tools_come_from_their_field() -> None:
    wrapped = {"type": "function", "function": {"name": "f"}}
    for tools in ([{"name": "f"}], [wrapped], '[{"name": "f"}]'):
        assert chat_of([ANSWER], tools=tools).tools == (wrapped,)
    assert chat_of([ANSWER]).tools == ()


def calling(calls: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ("text", "no_messages"),
        (str([USER, ANSWER]), "no_messages"),
        (r'[{"role": "assistant", "content": "\ud800"}]', "lone_surrogate"),
        ([], "no_messages"),
        (["text"], "turn_not_an_object"),
        ([{"role": "narrator", "content": "a"}], "unknown_role"),
        ([{"content": "a"}], "unknown_role"),
        ([USER], "nothing_to_learn"),
        ([{**ANSWER, "train": False}], "nothing_to_learn"),
        ([{"role": "assistant", "content": ""}], "empty_field"),
        ([{"role": "assistant", "content": None}], "null_field"),
        ([{"role": "assistant", "content": 3}], "not_text"),
        ([{"role": "assistant", "content": "a\0"}], "nul_character"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part_not_text"),
        ([{**ANSWER, "weight": 0.5}], "weight_not_0_or_1"),
        ([{"from": "function_call", "value": None}], "tool_call_without_name"),
        (calling(r'{"name": "\ud800"}'), "lone_surrogate"),
        (calling(r'{"name": "f", "id": "\ud800"}'), "lone_surrogate"),
        (calling([{"function": {}}]), "tool_call_without_name"),
        (calling([{"function": {"name": "f", "arguments": "{"}}]), "tool_call_not_json"),
        (calling([{"function": {"name": "f", "arguments": "[]"}}]), "tool_call_not_json"),
    ],
)
def test_records_that_are_not_chats(turns: Any, reason: str) -> None:
    with pytest.raises(Reject, match=f"^{reason}: "):
        chat_of(turns)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [USER, ANSWER]}, "missing_field: .* no field .turns.; it has conversat"),
        ({"data": [{"turns": []}]}, r"objects of .data. one per line, e\.g\. jq -c .\.data\[\].; "),
        ({"turns": [{"speaker": "user"}]}, r"no key of \[.speaker.\] is a role; set role_key"),
        ({"turns": [{"role": "user", "text": "a"}]}, "no key of .* is its text; set content_key"),
        ({"turns": str([USER, ANSWER])}, "Python printed this, write it with json.dumps"),
    ],
)
def test_a_chat_under_other_names_gets_the_fix(record: dict[str, Any], message: str) -> None:
    with pytest.raises(Reject, match=message):
        body_of(replace(SPEC, source=CHAT), record)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("", r"write a\? if it may be empty"),
        ([USER], r"{a:json} writes it, {a\.0} reaches into it"),
        (USER, r"{a\.role} reaches into it"),
    ],
)
def test_a_value_that_is_no_text_gets_the_fix(value: Any, fix: str) -> None:
    with pytest.raises(Reject, match=fix):
        compile_template("{a}")({"a": value})


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"meta": None, "id": 1}, "no field 'meta.q'; its 'meta' is null; it has meta, id"),
        ({"meta": {"qq": "a"}}, "no field 'meta.q'; did you mean 'qq'? 'meta' has qq"),
    ],
)
def test_a_missing_inner_field_is_explained_where_it_would_be(record: Any, told: str) -> None:
    with pytest.raises(Reject, match=re.escape(told)):
        compile_template("{meta.q}")(record)


def answer_of(**answer: Any) -> Any:
    return chat_of([USER, {**ANSWER, **answer}]).turns[1]


def call(arguments: Any) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_come_before_the_answer(key: str) -> None:
    assert answer_of(**{"reasoning_content": "", key: "so"}).content == "<think>\nso\n</think>\n\nb"
    assert answer_of(**{key: "so", "content": "<think>x</think>b"}).content == "<think>x</think>b"
    assert answer_of(**{key: None}).content == answer_of(**{key: " "}).content == "b"
    assert answer_of(**{key: "so", **call({})}).content == "<think>\nso\n</think>\n\n"
    with pytest.raises(Reject) as caught:
        answer_of(**{key: {"text": 3}})
    assert (caught.value.reason, caught.value.field) == ("not_text", f"turns.1.{key}")
    # Only an assistant thinks.
    assert chat_of([{**USER, key: "so"}, ANSWER]).turns[0].content == "a"


def test_calls_and_their_answers_keep_their_ids_and_names() -> None:
    calls = [{"id": "call_1", "function": {"name": "f"}}, {"id": 2, "name": "g"}, {"name": "h"}]
    tool = {"role": "tool", "content": "x"}
    body = chat_of([*calling(calls), {**tool, "tool_call_id": "call_1", "name": "f"}, tool])
    assert [call.id for call in body.turns[0].tool_calls] == ["call_1", "2", None]
    assert [turn.tool_call_id for turn in body.turns] == [None, "call_1", None]
    assert [turn.name for turn in body.turns] == [None, "f", None]
    frame, texts = frame_of(body)
    assert (put_together(frame, texts), frame.count(b'"name":"f"')) == (body, 2)
    # The frame of a chat without such a name is unchanged.
    assert b'"tool_call_id":null}' in frame


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"x": 1, "x": 2}', "not_json"),
        ('{"x": NaN}', "not_json"),
        (r'{"x": "\ud800"}', "lone_surrogate"),
        (r'{"x": "\u0000"}', "nul_character"),
        ('{"x": 18446744073709551616}', "integer_over_64_bits"),
        ({"x": [-(1 << 63) - 1]}, "integer_over_64_bits"),
        ({"x": datetime(2024, 1, 1)}, "not_json"),
    ],
)
def test_calls_and_tools_that_a_document_cannot_represent(arguments: Any, reason: str) -> None:
    with pytest.raises(Reject, match=f"^(tool_call_)?{reason}: "):
        answer_of(**call(arguments))
    tools = f"[{arguments}]" if isinstance(arguments, str) else [arguments]
    with pytest.raises(Reject, match=f"^(tools_)?{reason}: "):
        chat_of([ANSWER], tools=tools)
