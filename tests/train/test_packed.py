"""Bounds of documents in few shapes, and what the loss asks of the model."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_attention_routes import CPU, packed_batch
from test_families import FAMILIES, LENGTHS, SPANS, made

from expertflow.tokens.arrow import packed_rows
from expertflow.train.feed.batches import Batch, Collator
from expertflow.train.model import attention
from expertflow.train.model.packed import PackedLoss, padded_bounds


@pytest.fixture
def batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, 97, (2, 32)).astype(np.int32)
    return Collator(packed_rows(ids, LENGTHS, SPANS)).batch(np.arange(2))


def test_bounds_of_few_documents_have_one_shape_whatever_the_batch_holds() -> None:
    found = [padded_bounds(packed_batch(chosen), CPU).tolist() for chosen in ([0, 1], [1, 2])]
    assert found == [[0, 10, 17, 32, 52, 57, 64], [0, 20, 25, 32, 64, 64, 64]]


@pytest.mark.parametrize(
    ("chosen", "n_documents", "n_bounds"),
    [([1, 2], 129, 256), ([1], 128, 128), ([2], 1, 128), ([0, 2], 257, 384), ([0, 1], 384, 384)],
)
def test_bounds_of_many_documents_have_few_shapes(
    chosen: list[int], n_documents: int, n_bounds: int
) -> None:
    lengths = [[1] * 256, [2] * 128, [256]]
    rows = packed_rows(np.zeros((3, 256), np.int32), lengths, [[], [], []])
    batch = Collator(rows).batch(np.array(chosen))
    bounds = padded_bounds(batch, CPU)
    assert len(batch.cu_seqlens) == n_documents + 1 and len(bounds) == n_bounds + 1
    assert torch.equal(bounds[: n_documents + 1], batch.cu_seqlens)
    assert (bounds[n_documents:] == batch.input_ids_BL.numel()).all()


def test_no_document_is_lost_where_a_batch_holds_more_than_is_said() -> None:
    batch = replace(packed_batch([0, 1]), max_documents=2)
    assert torch.equal(padded_bounds(batch, CPU), batch.cu_seqlens)


def test_the_cuda_kernel_gets_one_dtype_under_autocast(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms of Qwen3 give fp32 queries beside bf16 values; the kernel refuses a mixture."""
    seen: list[set[torch.dtype]] = []

    def kernel(*tensors: torch.Tensor, window_size: object = None) -> torch.Tensor:
        seen.append({tensor.dtype for tensor in tensors[:3]})
        return torch.zeros_like(tensors[0])

    monkeypatch.setattr(attention, "KERNEL", attention.Kernel.of(kernel))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made(FAMILIES["qwen3"], "packed").base_model(
            input_ids=batch.input_ids_BL,
            position_ids=batch.position_ids_BL,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            max_length_q=batch.max_length,
        )
    assert seen == [{torch.bfloat16}] * 4


def test_labels_are_smoothed_in_training_only(batch: Batch) -> None:
    plain, smooth = (
        PackedLoss(made(FAMILIES["qwen3"], "packed"), label_smoothing=s) for s in (0.0, 0.3)
    )
    assert torch.equal(smooth.eval()(batch), plain.eval()(batch))
    assert smooth.train()(batch) != plain.train()(batch)
