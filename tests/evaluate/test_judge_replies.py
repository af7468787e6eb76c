"""What a judge's endpoint may reply costs a pair at most; its style is the one it answers."""

import json
import logging
import random

import pytest
from judge_server import Answer, Asked
from test_judge import judged, pairs, prefers

from expertflow.evaluate.judge.client import MAX_COUNT

CONTENT = '{"winner": "A"}'


def body(content: object, usage: object = None) -> bytes:
    reply = {"choices": [{"message": {"content": content}}], "usage": usage}
    return json.dumps(reply).encode()


@pytest.mark.parametrize(
    "count", ["1" + "0" * 400, str(MAX_COUNT + 1), "-1", "true", "1.5", '"7"', "null"]
)
def test_a_count_that_is_none_is_unknown(count: str) -> None:
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": 1}}'
    reply = body(CONTENT)[: -len(b"null}")] + usage.encode() + b"}"
    result, _ = judged(lambda _: Answer(body=reply), pairs(1))
    assert (result.n_failed, result.n_input_tokens, result.usd) == (0, None, None)
    assert result.n_output_tokens == 2


def test_a_wait_that_is_no_number_is_the_usual_wait() -> None:
    seen: list[str] = []

    def answering(asked: Asked) -> Answer:
        seen.append(asked.text)
        if seen.count(asked.text) == 1:
            return Answer(status=429, headers={"Retry-After": "9" * 400})
        return prefers("good")(asked)

    result, _ = judged(answering, pairs(1))
    assert (result.n_wins, result.n_failed) == (1, 0)


@pytest.mark.parametrize("text", [None, 3, [CONTENT], {}])
def test_parts_of_a_reply_that_are_no_text_are_passed_over(text: object) -> None:
    parts = [{"type": "text", "text": text}, {"type": "text", "text": CONTENT}, {}, None]
    result, _ = judged(lambda _: Answer(body=body(parts)), pairs(1))
    assert (result.n_failed, result.n_ties) == (0, 1)


def test_one_prompt_that_is_refused_does_not_change_how_the_others_are_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    questions = pairs(6)
    first = random.Random(0).sample(questions, 6)[0].prompt + "\n"

    def answering(asked: Asked) -> Answer:
        return Answer(status=400) if first in asked.text else prefers("good")(asked)

    result, asked = judged(answering, questions, seed=0)
    assert first in asked[0].text
    assert (result.n_wins, result.n_failed) == (5, 1)
    assert result.reason is not None and result.reason.startswith("HTTP 400 (2 of 2")
    others = [one.body for one in asked if first not in one.text]
    assert all(one["temperature"] == 0 and one["max_tokens"] == 64 for one in others)
    assert "max_completion_tokens" not in caplog.text


def test_the_newer_style_is_kept_once_it_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def answering(asked: Asked) -> Answer:
        return Answer(status=400) if "temperature" in asked.body else prefers("good")(asked)

    result, asked = judged(answering, pairs(8))
    assert (result.n_wins, result.n_failed) == (8, 0)
    assert sum("temperature" in one.body for one in asked) <= 2
    assert caplog.text.count("asking with max_completion_tokens") == 1
