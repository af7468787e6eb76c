"""Losses of documents and likelihoods of texts agree with token-by-token results."""

import gc
import math
import weakref
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from made_up_documents import example, spec
from made_up_model import END, PAD, VOCAB, Pairs, prompts, tiny_qwen3
from support import LORA
from transformers import Qwen3ForCausalLM

from expertflow.core.errors import EvaluationError
from expertflow.data.layout import chatml_layout
from expertflow.evaluate import likelihood
from expertflow.evaluate.generate import PromptCodec, generate_answers
from expertflow.evaluate.likelihood import choose_options, document_losses, log_likelihoods
from expertflow.evaluate.questions import EvalExample
from expertflow.evaluate.tasks.multiple_choice import MultipleChoice
from expertflow.tokens.arrow import PackedRows
from expertflow.train.model import attention
from expertflow.train.model.load import add_adapter
from expertflow.train.model.packed import PackedLoss, causal_lm, compute_held_out_loss

PAIRS = list(zip(prompts(1, 7, 3, 3, 12), prompts(4, 1, 9, 2, 1, seed=1), strict=True))


@torch.no_grad()
def losses_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the loss of each token after the first, in nats."""
    ids_T = torch.tensor(ids)
    logits = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.double(), ids_T[1:], reduction="none")


def test_likelihoods_are_those_of_each_text_alone() -> None:
    model = tiny_qwen3()
    expected = [-float(losses_of(model, a + b)[-len(b) :].sum()) for a, b in PAIRS]
    assert min(expected) < -3 and len(set(expected)) == 5
    for batch_size in (1, 2, 5):
        found = log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=batch_size)
        assert [nats for nats, _ in found] == pytest.approx(expected, rel=1e-5)
        assert [n for _, n in found] == [4, 1, 9, 2, 1]
    # Nothing is certain.
    found = log_likelihoods(model, [([4, 5], []), *PAIRS[:1]], pad_id=PAD, batch_size=2)
    assert found[0] == (0.0, 0) and found[1][1] == 4
    assert log_likelihoods(model, [], pad_id=PAD, batch_size=2) == []


def test_a_used_model_can_be_freed() -> None:
    # The first call imports libraries, whose log records pytest would keep with all frames.
    add_adapter(tiny_qwen3(), LORA)
    model = add_adapter(tiny_qwen3(), LORA).eval()
    alive = weakref.ref(causal_lm(model))
    how = spec(max_new_tokens=4)
    generate_answers(model, prompts(3, 5), PromptCodec(Pairs(), chatml_layout()), how)
    log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=2)
    del model
    gc.collect()
    assert alive() is None, "two models would be on a card"


def test_tokens_without_a_position_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    short = tiny_qwen3(n_positions=8)
    found = log_likelihoods(short, PAIRS, pad_id=PAD, batch_size=2)
    expected = log_likelihoods(tiny_qwen3(), PAIRS, pad_id=PAD, batch_size=2)
    wanted = [*expected[:2], (-math.inf, 9), expected[3], (-math.inf, 1)]
    assert [n for _, n in found] == [n for _, n in wanted]
    # Other texts in a batch change the order of sums.
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in wanted], rel=1e-5)
    assert "2 of 5 texts are longer than the model's 8 positions" in caplog.text


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3()
    expected = log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=1)
    run, room = likelihood.document_losses, 1

    def fits(model: Any, rows: Any, *, micro_batch_size: int) -> Any:
        if micro_batch_size > room:
            raise torch.OutOfMemoryError("no room")
        return run(model, rows, micro_batch_size=micro_batch_size)

    monkeypatch.setattr(likelihood, "document_losses", fits)
    assert log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=32) == expected
    room = 0
    # Nothing is generated here.
    with pytest.raises(EvaluationError, match="at a time; use a larger card"):
        log_likelihoods(model, PAIRS, pad_id=PAD, batch_size=32)


ENGINE = Pairs()


def held(prompt: list[int], options: list[str]) -> EvalExample:
    ids = ENGINE.encode_flat(options).tolist()
    pairs = {text: (prompt, [*own, END]) for text, own in zip(options, ids, strict=True)}
    return EvalExample(example(0, "q", options[0]), prompt, options=pairs)


def choose(asked: list[EvalExample], batch_size: int = 3) -> list[str]:
    found = choose_options(tiny_qwen3(), asked, pad_id=PAD, batch_size=batch_size)
    assert all(answer.not_asked is None for answer in found)
    return [answer.text for answer in found]


def test_the_option_with_the_highest_likelihood_per_token_is_chosen() -> None:
    options = ["CaDaEaFa", "Ga", "GaHa", "Ib"]
    asked = [held(prompt, options) for prompt in prompts(3, 5, 8, 2, 6)]
    found = choose(asked)
    for question, chosen in zip(asked, found, strict=True):
        pairs = list(question.options.values())
        likely = log_likelihoods(tiny_qwen3(), pairs, pad_id=PAD, batch_size=1)
        means = [nats / n for nats, n in likely]
        assert chosen == options[means.index(max(means))]
    assert len(set(found)) > 1
    assert choose(asked, batch_size=20) == found


def test_labels_are_compared_if_the_data_uses_labels() -> None:
    task = MultipleChoice(spec(fields={"choices": "options", "answer": "correct"}))
    expected = {
        " Ba\n": ["Aa", "Ba"], "Ha": ["Ga", "Ha"], "The answer is Ha": ["Ga", "Ha"],
    }  # fmt: skip
    for reference, wanted in expected.items():
        asked = example(0, "q", reference, options={"Aa": "Ga", "Ba": "Ha"})
        assert task.list_options(asked) == wanted


def test_a_question_with_an_option_that_has_no_position_is_not_asked() -> None:
    for options in (["GaHaIaJa", "Ga"], ["GaHaIa", "HaIaGa"]):
        long, short = (held(prompt, options) for prompt in prompts(6, 2))
        model = tiny_qwen3(n_positions=8)
        found = choose_options(model, [long, short], pad_id=PAD, batch_size=2)
        assert found[0].text == "" and "positions" in (found[0].not_asked or "")
        assert [found[1].text] == choose([short])


@pytest.fixture(scope="module", params=[attention.NAME, "sdpa"])
def packed_model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    model = tiny_qwen3()
    model.set_attn_implementation(request.param)
    return model


@torch.no_grad()
def test_documents_have_the_loss_they_have_alone(packed_model: Qwen3ForCausalLM) -> None:
    # Rows of several documents: some cut, one without targets, one padded.
    ids_NL = np.random.default_rng(0).integers(2, VOCAB, (5, 24)).astype(np.int32)
    lengths = [[24], [14, 10], [5, 6, 7], [1, 2, 21], [23]]
    learnt = [[], [2, 14, 16, 24], [0, 3, 7, 11, 15, 18], [0, 24], [20, 23]]
    rows = PackedRows.from_lists(ids_NL, lengths, learnt)
    nats, counts = [], []
    for i in range(len(rows)):
        [ids] = rows.take_ids(np.array([i])).tolist()
        spans = rows.spans[i].reshape(-1, 2).tolist()
        learned = {place for start, end in spans for place in range(start, end)}
        bounds = [0, *np.cumsum(rows.seq_lengths[i]).tolist()]
        for start, end in pairwise(bounds):
            chosen = [place in learned for place in range(start + 1, end)]
            nats.append(float(losses_of(tiny_qwen3(), ids[start:end])[chosen].sum()))
            counts.append(sum(chosen))
    assert counts == [0, 12, 8, 2, 4, 3, 0, 1, 20, 3]
    for micro_batch_size in (1, 2, 8):
        found = document_losses(packed_model, rows, micro_batch_size=micro_batch_size)
        assert found.n_targets_D.tolist() == counts
        np.testing.assert_allclose(found.nats_D, nats, rtol=1e-5, atol=1e-5)
    # They add up to the held-out loss, which skips the row without targets.
    loss, batches = PackedLoss(packed_model).eval(), Mock()
    mean, n_targets = compute_held_out_loss(loss, rows, micro_batch_size=1, before_batch=batches)
    assert batches.call_count == 4
    assert found.n_targets_D.sum() == n_targets
    assert found.nats_D.sum() == pytest.approx(mean * n_targets, rel=1e-6)
