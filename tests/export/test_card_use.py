"""The model card says how to load the expert, and to ask and decode as the scores were reached."""

import ast
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from made_up_card import HOSTILE, card_inputs, exported, make_gpu_inputs, parts
from markdown_it import MarkdownIt

from expertflow.evaluate.records import Decoding
from expertflow.export.card import CardInputs, model_card


@pytest.fixture
def inputs() -> CardInputs:
    return card_inputs(make_gpu_inputs())


def options(card: str, command: str) -> list[str]:
    """Give the words of the one line of the card that begins with a command."""
    [line] = [line for line in card.splitlines() if line.startswith(command)]
    return shlex.split(line)


@pytest.mark.parametrize(
    ("decoding", "vllm", "llama"),
    [
        (Decoding(), {"temperature": 0}, ["--temp", "0"]),
        (
            Decoding(temperature=0.7, top_p=0.9, top_k=5),
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
            ["--temp", "0.7", "--top-p", "0.9", "--top-k", "5", "--min-p", "0"],
        ),
        (
            Decoding(temperature=1.0),
            {"temperature": 1.0, "top_p": 1.0},
            ["--temp", "1", "--top-p", "1", "--top-k", "0", "--min-p", "0"],
        ),
    ],
)
def test_other_servers_are_told_to_decode_as_the_scores_were_reached(
    inputs: CardInputs, decoding: Decoding, vllm: dict[str, Any], llama: list[str]
) -> None:
    told = replace(inputs, spec=replace(inputs.spec, decoding=decoding))
    card = model_card(told, exported())
    *start, override = options(card, "vllm")
    assert start == ["vllm", "serve", ".", "--override-generation-config"]
    assert json.loads(override) == vllm
    assert options(card, "llama-cli") == ["llama-cli", "-m", "model.gguf", *llama]


def test_stop_texts_and_thoughts_are_told(inputs: CardInputs) -> None:
    plain_card = model_card(inputs, exported())
    assert "ends before these texts" not in plain_card and "<think>" not in plain_card
    layout = replace(inputs.model.layout, chat_template="{{ '<think>' }}")
    card = model_card(
        replace(
            inputs,
            spec=replace(inputs.spec, decoding=Decoding(stop=(";\n\n", "`"))),
            model=replace(inputs.model, layout=layout),
        ),
        exported(),
    )
    assert 'ends before these texts, too (as JSON): `";\\n\\n"`, `` "`" ``.' in card
    assert "A block `<think>…</think>` that begins an answer was left out" in card


def test_the_system_prompt_of_training_is_in_the_snippet(inputs: CardInputs) -> None:
    system = 'Say "SQL".\n```\n# é \u2028'
    told = replace(inputs, spec=replace(inputs.spec, system_prompt=system))
    snippet = model_card(told, exported()).split("```python\n")[1].split("\n```\n")[0]
    [chat] = [node for node in ast.parse(snippet).body if isinstance(node, ast.Assign)
              and ast.unparse(node.targets[0]) == "chat"]  # fmt: skip
    assert ast.literal_eval(chat.value) == [
        {"role": "system", "content": system}, {"role": "user", "content": "..."}
    ]  # fmt: skip
    assert '"role": "system"' not in model_card(inputs, exported())


def test_a_held_out_question_shows_the_form_of_a_prompt(inputs: CardInputs) -> None:
    [sample, *_] = inputs.evaluation.samples
    long = replace(sample, prompt=f"Be brief.\n{HOSTILE}\n```\n" + "x" * 2000)
    told = replace(
        inputs,
        spec=replace(inputs.spec, system_prompt="Be brief."),
        evaluation=replace(inputs.evaluation, samples=(long,)),
    )
    _, body = parts(model_card(told, exported()))
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(body)
    [shown] = [token.content for token in tokens if token.type == "code_block"]
    assert shown.startswith(HOSTILE.splitlines()[0]) and "```" in shown
    assert len(shown) < 700 and "its first 600 characters" in body
    assert not [token for token in tokens if token.type == "html_block"]
    none = replace(inputs, evaluation=replace(inputs.evaluation, samples=()))
    assert "Questions look like" not in model_card(none, exported())
