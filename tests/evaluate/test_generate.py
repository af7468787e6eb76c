import logging
import weakref
from collections import Counter
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from made_up_documents import spec
from made_up_model import END, PAD, VOCAB, Pairs, prompts, tiny_qwen3
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3ForCausalLM,
)

from expertflow.core.errors import EvaluationError
from expertflow.data.layout import chatml_layout
from expertflow.evaluate import generate
from expertflow.evaluate.generate import Answer, Draws, PromptCodec, finish_answer, generate_answers
from expertflow.evaluate.records import Decoding
from expertflow.train.model import attention

ENGINE = Pairs()
CODEC = PromptCodec(ENGINE, chatml_layout())
SAMPLED = Decoding(temperature=0.9, top_p=0.95, top_k=20)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return tiny_qwen3()


def ask(model: Any, asked: list[list[int]], batch_size: int = 4, **changes: Any) -> list[Answer]:
    how = spec(**{"batch_size": batch_size, "max_new_tokens": 12, **changes})
    return generate_answers(model, asked, CODEC, how)


def test_the_answer_to_a_prompt_does_not_depend_on_its_batch(model: Qwen3ForCausalLM) -> None:
    asked = prompts(3, 9, 5, 1, 7, 9, 2)
    for decoding in (Decoding(), SAMPLED):
        alone = [ask(model, [prompt], 1, decoding=decoding)[0] for prompt in asked]
        assert len({answer.text for answer in alone}) == len(asked)
        for batch_size in (2, 3, 7):
            assert ask(model, asked, batch_size, decoding=decoding) == alone
        assert ask(model, asked[::-1], 3, decoding=decoding) == alone[::-1]


def test_a_finished_row_does_not_run_out_of_positions() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    learned = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=END)).eval()
    asked = prompts(4, 28, 20, 28)
    alone = [ask(learned, [prompt], 1)[0] for prompt in asked]
    # Two characters a token.
    assert [len(answer.text) for answer in alone] == [24, 8, 24, 8]
    assert ask(learned, asked) == alone


def test_greedy_answers_are_the_most_likely_tokens(model: Qwen3ForCausalLM) -> None:
    for prompt, answer in zip(prompts(4, 6), ask(model, prompts(4, 6)), strict=True):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 12 and ids[-1] not in (END, PAD):
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        written = ids[len(prompt) :]
        ended = written[-1] in (END, PAD)
        assert answer.text == ENGINE.decode(written[:-1] if ended else written)
        assert answer.ended == ended


def test_draws_follow_the_seed_and_the_distribution(model: Qwen3ForCausalLM) -> None:
    first, again, other = (ask(model, prompts(4), decoding=SAMPLED, seed=s) for s in (0, 0, 1))
    assert first == again != other
    asked = [[i] for i in range(4000)]
    scores = torch.tensor([3.0, 1.0, 2.0, -torch.inf]).log_softmax(0).expand(4000, -1)

    def drawn(**settings: Any) -> Counter[int]:
        draws = Draws(Decoding(**settings), asked, 0)
        return Counter(draws(torch.zeros(4000, 1), scores).argmax(1).tolist())

    counts = drawn(temperature=2.0)
    expected = (torch.tensor([3.0, 1.0, 2.0]) / 2).softmax(0) * 4000
    assert all(abs(counts[i] - expected[i]) < 130 for i in range(3)) and not counts[3]
    assert set(drawn(temperature=2.0, top_k=2)) == {0, 2}
    assert set(drawn(temperature=1.0, top_p=0.5)) == {0}


def test_a_stop_text_across_tokens_ends_an_answer(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Mock(wraps=finish_answer)
    monkeypatch.setattr(generate, "finish_answer", finish)
    asked = prompts(3, 9, 5)
    whole = ask(model, asked, max_new_tokens=20)
    text = whole[0].text
    stop = text[5:8]  # the end of one token and a complete one
    found = ask(model, asked, max_new_tokens=20, decoding=Decoding(stop=(stop, "no such text")))
    place = text.index(stop)
    assert found[0] == Answer(text[:place], ended=True)
    # Nothing was written after it.
    rows = [call.args[0] for call in finish.mock_calls]
    written = [len([*takewhile(lambda token: token not in (END, PAD), row)]) for row in rows]
    assert (place + len(stop) + 1) // 2 in written
    assert all(a == w for a, w in zip(found, whole, strict=True) if stop not in w.text)


def test_thoughts_are_not_part_of_an_answer_even_if_the_prompt_opens_them() -> None:
    for prompt, text, answer in (
        ("assistant\n", "<think>\nhm\n</think>\n\nCa", "Ca"),
        ("assistant\n<think>\n", "hm\n</think>\n\nCa", "Ca"),
        ("assistant\n<think>\n", "still at it", "still at it"),
        ("is </think> a tag?", "</think> is one", "</think> is one"),
    ):
        engine: Any = SimpleNamespace(decode=lambda _, text=text: text)
        assert finish_answer([2], prompt, engine, ends=frozenset(), stops=()).text == answer


def test_each_answers_prompt_decides_whether_it_opens_thoughts(model: Qwen3ForCausalLM) -> None:
    asked = prompts(4, 6)

    class Opened(Pairs):
        def decode(self, ids: list[int]) -> str:
            return "ask <think>\n" if ids == asked[1] else f"hm</think>{super().decode(ids)}"

    plain = [answer.text for answer in ask(model, asked)]
    found = generate_answers(model, asked, PromptCodec(Opened(), CODEC.layout), spec())
    assert [found[0].text[:10], found[1].text[:5]] == ["hm</think>", plain[1][:5]]


def test_a_prompt_that_leaves_no_position_is_not_asked(caplog: Any) -> None:
    short = tiny_qwen3(n_positions=8)
    asked = prompts(8, 6, 3)
    found = ask(short, asked)
    assert found[0].not_asked is not None and "8 tokens" in found[0].not_asked
    assert (found[0].text, found[0].ended) == ("", False)
    assert "no position" in caplog.text
    # The others are answered up to the last position, each by its own length.
    assert [len(one.text) for one in found[1:]] == [4, 10]
    assert found[2].text == ask(tiny_qwen3(), asked[2:])[0].text[:10]


def test_the_models_own_decoding_settings_do_not_count(model: Qwen3ForCausalLM) -> None:
    expected = ask(model, prompts(4, 7))
    other = tiny_qwen3()
    other.generation_config.update(
        do_sample=True, temperature=0.6, top_k=3, repetition_penalty=3.0, max_new_tokens=2
    )
    before = other.generation_config.to_dict()
    assert ask(other, prompts(4, 7)) == expected
    assert other.generation_config.to_dict() == before
    # But its end tokens end an answer.
    first = ENGINE.encode_flat([expected[0].text]).values[0]
    other.generation_config.eos_token_id = [int(first)]
    assert ask(other, prompts(4, 7))[0] == Answer("", ended=True)


def test_attention_is_replaced_and_restored(model: Qwen3ForCausalLM) -> None:
    other = tiny_qwen3()
    other.set_attn_implementation(attention.NAME)
    assert ask(other, prompts(4)) == ask(model, prompts(4))
    assert other.config._attn_implementation == attention.NAME


def test_a_batch_that_does_not_fit_is_freed_and_halved(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    run, room = model.generate, 2
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[Any] = []

    def fits(**settings: Any) -> Any:
        if len(settings["input_ids"]) > room:
            cache = torch.zeros(1)
            made.append(weakref.ref(cache))
            # As the driver says it, outside torch's allocator.
            raise RuntimeError("CUDA error: out of memory")
        return run(**settings)

    asked = prompts(3, 9, 5, 1, 7, 9)
    expected = ask(model, asked)
    monkeypatch.setattr(model, "generate", fits)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(made[-1]()))
    with caplog.at_level(logging.WARNING):
        assert ask(model, asked, 6) == expected
    assert "continuing with 3" in caplog.text and "continuing with 1" in caplog.text
    assert held == [None, None]
    room = 0
    with pytest.raises(EvaluationError, match="at a time; lower evaluation"):
        ask(model, asked)


def test_a_family_without_sdpa_support_answers_too() -> None:
    torch.manual_seed(0)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 64}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=60, sliding_window=4, **shape, **tokens))
    asked = prompts(3, 9, 5)
    assert ask(model, asked, 3) == [ask(model, [prompt])[0] for prompt in asked]
    assert model.training
