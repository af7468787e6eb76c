from itertools import pairwise

import numpy as np
import pytest
import torch
from made_up_model import VOCAB, tiny_qwen3
from transformers import Qwen3ForCausalLM

from expertflow.evaluate import likelihood
from expertflow.evaluate.likelihood import document_losses
from expertflow.tokens.arrow import PackedRows, packed_rows
from expertflow.train.model import attention
from expertflow.train.model.packed import PackedLoss, held_out_loss


@pytest.fixture(scope="module", params=[attention.NAME, "sdpa"])
def model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    attention.register()
    model = tiny_qwen3()
    model.set_attn_implementation(request.param)
    return model


def made_rows() -> PackedRows:
    """Rows of several documents, some cut off, one with nothing to predict, one padded."""
    ids = np.random.default_rng(0).integers(2, VOCAB, (5, 24)).astype(np.int32)
    lengths = [[24], [14, 10], [5, 6, 7], [1, 2, 21], [23]]
    spans = [[], [2, 14, 16, 24], [0, 3, 7, 11, 15, 18], [0, 24], [20, 23]]
    return packed_rows(ids, lengths, spans)


def one_by_one(model: Qwen3ForCausalLM, rows: PackedRows) -> tuple[list[float], list[int]]:
    """Take each document's loss from all logits of the document alone."""
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
    model: Qwen3ForCausalLM, micro_batch_size: int
) -> None:
    rows = made_rows()
    plain = tiny_qwen3()
    nats, counts = one_by_one(plain, rows)
    found = document_losses(model, rows, micro_batch_size=micro_batch_size)
    assert found.n_targets_D.tolist() == counts == [0, 12, 8, 2, 4, 3, 0, 1, 20, 3]
    np.testing.assert_allclose(found.nats_D, nats, rtol=1e-5, atol=1e-5)


def test_they_add_up_to_the_held_out_loss(model: Qwen3ForCausalLM) -> None:
    rows = made_rows()
    mean, n_targets = held_out_loss(PackedLoss(model), rows, micro_batch_size=2)
    found = document_losses(model, rows, micro_batch_size=2)
    assert found.n_targets_D.sum() == n_targets
    assert found.nats_D.sum() == pytest.approx(mean * n_targets, rel=1e-6)


def test_logits_exist_a_chunk_at_a_time(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights = []
    linear = torch.nn.functional.linear

    def watched(rows: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if len(weight) == VOCAB:
            heights.append(len(rows))
        return linear(rows, weight, *rest)

    expected = document_losses(model, made_rows(), micro_batch_size=8)
    monkeypatch.setattr(likelihood, "chunk_rows", lambda head: 5)
    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    found = document_losses(model, made_rows(), micro_batch_size=8)
    assert max(heights) == 5 and sum(heights) == 53
    np.testing.assert_allclose(found.nats_D, expected.nats_D, rtol=1e-6)
