"""Losses of documents and likelihoods of texts agree with token-by-token results."""

import logging
import math
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_documents import spec
from made_up_model import END, PAD, VOCAB, Pairs, prompts, tiny_qwen3
from support import LORA
from transformers import Qwen3ForCausalLM

from expertflow.data.layout import chatml_layout
from expertflow.evaluate import likelihood
from expertflow.evaluate.evaluator import Models
from expertflow.evaluate.generate import PromptCodec, generate_answers
from expertflow.evaluate.likelihood import choose_options, document_losses, log_likelihoods
from expertflow.evaluate.questions import EvalExample
from expertflow.evaluate.records import Example
from expertflow.evaluate.tasks.multiple_choice import MultipleChoice
from expertflow.tokens.arrow import PackedRows
from expertflow.train.model import attention
from expertflow.train.model.load import add_adapter
from expertflow.train.model.packed import PackedLoss, causal_lm, compute_held_out_loss

PAIRS = list(zip(prompts(1, 7, 3, 3, 12), prompts(4, 1, 9, 2, 1, seed=1), strict=True))


@torch.no_grad()
def naive(model: Any, prompt: list[int], continuation: list[int]) -> float:
    total = 0.0
    for i, token in enumerate(continuation):
        logits = model(input_ids=torch.tensor([prompt + continuation[:i]])).logits[0, -1]
        total += float(logits.double().log_softmax(0)[token])
    return total


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_likelihoods_are_those_of_token_after_token(batch_size: int) -> None:
    model = tiny_qwen3()
    found = log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=batch_size)
    expected = [naive(model, *pair) for pair in PAIRS]
    assert [nats for nats, _ in found] == pytest.approx(expected, rel=1e-5)
    assert [n for _, n in found] == [4, 1, 9, 2, 1]
    assert min(expected) < -3 and len(set(expected)) == 5


def test_nothing_is_certain() -> None:
    found = log_likelihoods(tiny_qwen3(), [([4, 5], []), *PAIRS[:1]], pad_id=PAD, batch_size=2)
    assert found[0] == (0.0, 0) and found[1][1] == 4
    assert log_likelihoods(tiny_qwen3(), [], pad_id=PAD, batch_size=2) == []


def test_a_model_that_was_asked_can_be_let_go() -> None:
    # The first call imports libraries, whose log records pytest would keep with all frames.
    add_adapter(tiny_qwen3(), LORA)
    models = Models(lambda _: add_adapter(tiny_qwen3(), LORA).eval(), Path("checkpoint"))
    model = weakref.ref(causal_lm(models.get(None)))
    how = spec(max_new_tokens=4)
    generate_answers(models.get(None), prompts(3, 5), PromptCodec(Pairs(), chatml_layout()), how)
    log_likelihoods(models.get(None), PAIRS, pad_id=PAD, batch_size=2)
    models.release()
    assert model() is None, "two models would be on a card"


def test_what_has_no_position_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    short = tiny_qwen3(n_positions=8)
    found = log_likelihoods(short, PAIRS, pad_id=PAD, batch_size=2)
    expected = log_likelihoods(tiny_qwen3(), PAIRS, pad_id=PAD, batch_size=2)
    wanted = [*expected[:2], (-math.inf, 9), expected[3], (-math.inf, 1)]
    assert [n for _, n in found] == [n for _, n in wanted]
    # Other texts in a batch change the order of sums.
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in wanted], rel=1e-5)
    assert "2 of 5 texts are longer than the model's 8 positions" in caplog.text


def test_a_batch_that_does_not_fit_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_qwen3()
    expected = log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=1)
    run = likelihood.document_losses

    def fits(model: Any, rows: Any, *, micro_batch_size: int) -> Any:
        if micro_batch_size > 1:
            raise torch.OutOfMemoryError("no room")
        return run(model, rows, micro_batch_size=micro_batch_size)

    monkeypatch.setattr(likelihood, "document_losses", fits)
    with caplog.at_level(logging.WARNING):
        found = log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=32)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], rel=1e-5)
    assert [n for _, n in found] == [n for _, n in expected]
    assert "out of memory with 5 questions at a time; going on with 2" in caplog.text


FIELDS = {"choices": "options", "answer": "correct"}
ENGINE = Pairs()


def held(
    prompt: list[int], options: list[str], correct: Any, reference: str, engine: Any = ENGINE
) -> EvalExample:
    fields = {"options": options, "correct": correct}
    example = Example(document_id="d", prompt="q", reference=reference, fields=fields)
    ids = engine.encode_flat(options).tolist()
    pairs = {text: (prompt, [*own, END]) for text, own in zip(options, ids, strict=True)}
    return EvalExample(example, prompt, options=pairs)


def choose(asked: list[EvalExample], batch_size: int = 3, n_positions: int = 512) -> list[str]:
    model = tiny_qwen3(n_positions=n_positions)
    found = choose_options(model, asked, pad_id=PAD, batch_size=batch_size)
    assert all(answer.not_asked is None for answer in found)
    return [answer.text for answer in found]


def test_the_option_most_likely_a_token_is_chosen() -> None:
    options = ["CaDaEaFa", "Ga", "GaHa", "Ib"]
    asked = [held(prompt, options, "A", options[0]) for prompt in prompts(3, 5, 8, 2, 6)]
    found = choose(asked)
    for question, chosen in zip(asked, found, strict=True):
        ids = [*ENGINE.encode_flat(options).tolist()]
        pairs = [(question.prompt_ids, [*option, END]) for option in ids]
        likely = log_likelihoods(tiny_qwen3(), pairs, pad_id=PAD, batch_size=1)
        means = [nats / n for nats, n in likely]
        assert chosen == options[means.index(max(means))]
    assert len(set(found)) > 1
    assert choose(asked, batch_size=20) == found


def test_labels_are_compared_where_the_data_answers_by_labels() -> None:
    fields = {"options": {"Aa": "Ga", "Ba": "Ha"}}
    for reference, wanted in (
        (" Ba\n", ["Aa", "Ba"]), ("Ha", ["Ga", "Ha"]), ("The answer is Ha", ["Ga", "Ha"])
    ):  # fmt: skip
        example = Example(document_id="d", prompt="q", reference=reference, fields=fields)
        assert MultipleChoice(spec(fields=FIELDS)).list_options(example) == wanted


@pytest.mark.parametrize("options", [["GaHaIaJa", "Ga"], ["GaHaIa", "HaIaGa"]])
def test_a_question_with_an_option_that_has_no_position_is_not_asked(options: list[str]) -> None:
    long, short = (held(prompt, options, 0, options[0]) for prompt in prompts(6, 2))
    found = choose_options(
        tiny_qwen3(n_positions=8), [long, short], pad_id=PAD, batch_size=2
    )  # fmt: skip
    assert found[0].text == "" and "positions" in (found[0].not_asked or "")
    assert [found[1].text] == choose([short])


@pytest.fixture(scope="module", params=[attention.NAME, "sdpa"])
def packed_model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    model = tiny_qwen3()
    model.set_attn_implementation(request.param)
    return model


def made_rows() -> PackedRows:
    """Rows of several documents: some cut, one without targets, one padded."""
    ids = np.random.default_rng(0).integers(2, VOCAB, (5, 24)).astype(np.int32)
    lengths = [[24], [14, 10], [5, 6, 7], [1, 2, 21], [23]]
    spans = [[], [2, 14, 16, 24], [0, 3, 7, 11, 15, 18], [0, 24], [20, 23]]
    return PackedRows.from_lists(ids, lengths, spans)


def one_by_one(model: Qwen3ForCausalLM, rows: PackedRows) -> tuple[list[float], list[int]]:
    """Compute each document's loss from its own logits."""
    nats, counts = [], []
    for i in range(len(rows)):
        ids = torch.tensor(rows.take_ids(np.array([i])))
        learned = torch.zeros(rows.length, dtype=torch.bool)
        for start, end in rows.spans[i].reshape(-1, 2).tolist():
            learned[start:end] = True
        bounds = [0, *np.cumsum(rows.seq_lengths[i]).tolist()]
        for start, end in pairwise(bounds):
            logits = model(input_ids=ids[:, start:end].long(), use_cache=False).logits[0, :-1]
            targets, chosen = ids[0, start + 1 : end].long(), learned[start + 1 : end]
            each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            nats.append(float(each[chosen].double().sum()))
            counts.append(int(chosen.sum()))
    return nats, counts


@torch.no_grad()
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_documents_have_the_loss_they_have_alone(
    packed_model: Qwen3ForCausalLM, micro_batch_size: int
) -> None:
    rows = made_rows()
    plain = tiny_qwen3()
    nats, counts = one_by_one(plain, rows)
    found = document_losses(packed_model, rows, micro_batch_size=micro_batch_size)
    assert found.n_targets_D.tolist() == counts == [0, 12, 8, 2, 4, 3, 0, 1, 20, 3]
    np.testing.assert_allclose(found.nats_D, nats, rtol=1e-5, atol=1e-5)


def test_they_add_up_to_the_held_out_loss(packed_model: Qwen3ForCausalLM) -> None:
    rows = made_rows()
    mean, n_targets = compute_held_out_loss(PackedLoss(packed_model), rows, micro_batch_size=2)
    found = document_losses(packed_model, rows, micro_batch_size=2)
    assert found.n_targets_D.sum() == n_targets
    assert found.nats_D.sum() == pytest.approx(mean * n_targets, rel=1e-6)
