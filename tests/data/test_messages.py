"""Turns of chats: what they thought, what they called, and what JSON cannot hold."""

from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace
from test_shapes import SPEC, body_of, chat_of

from expertflow.data.records import Body
from expertflow.data.reject import Reject
from expertflow.data.settings import SourceSpec

USER = {"role": "user", "content": "a"}
SOURCE = SourceSpec(name="s", kind="local", messages="turns", tools="tools")


def answer_of(**answer: Any) -> Any:
    return chat_of([USER, {"role": "assistant", "content": "b", **answer}]).turns[1]


def body_with(tools: Any) -> Body:
    turns = [{"role": "assistant", "content": "b"}]
    return body_of(replace(SPEC, source=SOURCE), {"turns": turns, "tools": tools})


def call(arguments: Any) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_go_before_the_answer(key: str) -> None:
    assert answer_of(**{key: "so"}).content == "<think>\nso\n</think>\n\nb"
    assert answer_of(**{key: "so", "content": "<think>x</think>b"}).content == "<think>x</think>b"
    assert answer_of(**{key: None}).content == answer_of(**{key: " "}).content == "b"
    assert answer_of(**{key: "so", **call({})}).content == "<think>\nso\n</think>\n\n"
    with pytest.raises(Reject) as caught:
        answer_of(**{key: {"text": 3}})
    assert (caught.value.reason, caught.value.field) == ("not_text", f"turns.1.{key}")


def test_only_an_assistant_thinks() -> None:
    body = chat_of([{**USER, "reasoning": "so"}, {"role": "assistant", "content": "b"}])
    assert body.turns[0].content == "a"


def test_calls_and_their_answers_keep_their_ids() -> None:
    calls = [{"id": "call_1", "function": {"name": "f"}}, {"id": 2, "name": "g"}, {"name": "h"}]
    body = chat_of(
        [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": "x"},
            {"role": "tool", "content": "y"},
        ]
    )
    assert [call.id for call in body.turns[0].tool_calls] == ["call_1", "2", None]
    assert [turn.tool_call_id for turn in body.turns] == [None, "call_1", None]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"x": 1, "x": 2}', "tool_call_not_json"),
        ('{"x": NaN}', "tool_call_not_json"),
        (r'{"x": "\ud800"}', "tool_call_not_json"),
        (r'{"x": "\u0000"}', "nul_character"),
        ('{"x": 18446744073709551616}', "integer_over_64_bits"),
        ({"x": [-(1 << 63) - 1]}, "integer_over_64_bits"),
        ({"x": float("inf")}, "tool_call_not_json"),
        ({"x": datetime(2024, 1, 1)}, "tool_call_not_json"),
        ({"x": Decimal(1)}, "tool_call_not_json"),
        ({"x": b"y"}, "tool_call_not_json"),
    ],
)
def test_arguments_that_a_document_cannot_hold(arguments: Any, reason: str) -> None:
    with pytest.raises(Reject) as caught:
        answer_of(**call(arguments))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ('[{"name": "f", "name": "g"}]', "tools_not_json"),
        ('[{"name": "f", "x": Infinity}]', "tools_not_json"),
        ('[{"name": "f", "x": 18446744073709551616}]', "integer_over_64_bits"),
        ([{"name": "f", "x": 1 << 64}], "integer_over_64_bits"),
        ([{"name": "f", "x": Decimal(1)}], "tools_not_json"),
    ],
)
def test_tools_that_a_document_cannot_hold(tools: Any, reason: str) -> None:
    with pytest.raises(Reject) as caught:
        body_with(tools)
    assert caught.value.reason == reason


def test_names_and_ids_in_a_text_are_looked_at_as_well() -> None:
    for text in (r'{"name": "\ud800"}', r'{"name": "f", "id": "\ud800"}'):
        with pytest.raises(Reject, match="tool_call_not_json"):
            answer_of(tool_calls=text)


def test_the_largest_integers_are_kept() -> None:
    (found,) = answer_of(**call({"x": [-(1 << 63), (1 << 64) - 1]})).tool_calls
    assert found.arguments == {"x": [-(1 << 63), (1 << 64) - 1]}


@pytest.mark.parametrize(
    ("roles", "n_calls"), [({"USER": "user"}, 1), ({"function_call": "assistant"}, 0)]
)
def test_a_call_is_a_call_unless_its_role_is_mapped(roles: dict[str, str], n_calls: int) -> None:
    value = '{"name": "f", "arguments": {"x": 1}}'
    body = chat_of([{"from": "function_call", "value": value}], roles=roles)
    assert len(body.turns[0].tool_calls) == n_calls
    assert body.turns[0].content == ("" if n_calls else value)


def test_a_call_that_calls_nothing_is_refused() -> None:
    with pytest.raises(Reject, match="tool_call_without_name"):
        chat_of([{"from": "function_call", "value": None}])
