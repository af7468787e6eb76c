"""Bounds of documents in few shapes, and what the loss asks of the model."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_attention_routes import CPU, packed_batch
from test_families import FAMILIES, LENGTHS, SPANS, made

from expertflow.core.errors import TrainingError
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Batch, Collator
from expertflow.train.model import attention
from expertflow.train.model.packed import PackedLoss, padded_bounds
from expertflow.train.model.self_check import check_model


@pytest.fixture
def batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, 97, (2, 32)).astype(np.int32)
    return Collator(PackedRows.from_lists(ids, LENGTHS, SPANS)).batch(np.arange(2))


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
    rows = PackedRows.from_lists(np.zeros((3, 256), np.int32), lengths, [[], [], []])
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

    def kernel(*tensors: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append({tensor.dtype for tensor in tensors[:3]})
        return torch.zeros_like(tensors[0])

    monkeypatch.setattr(attention, "KERNEL", kernel)
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


def test_nothing_is_changed_by_the_check() -> None:
    net = made(FAMILIES["qwen3"], "packed", adapter=True, checkpointing=True)
    net.get_base_model().model.layers[0].eval()
    loss = PackedLoss(net)
    modes = [module.training for module in loss.modules()]
    weights = [p.detach().clone() for p in net.parameters()]
    random = torch.random.get_rng_state()
    check_model(loss)
    assert [module.training for module in loss.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert net.config._attn_implementation == attention.NAME
    assert not net.get_base_model().base_model._forward_hooks


@pytest.mark.parametrize("autocast", [False, True])
def test_documents_that_see_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    def whole_rows(batch: Any, device: torch.device) -> torch.Tensor:
        n_rows, length = batch.input_ids_BL.shape
        return torch.arange(n_rows + 1, dtype=torch.int32) * length

    loss = PackedLoss(made(FAMILIES["qwen3"], "packed"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        check_model(loss)
        monkeypatch.setattr("expertflow.train.model.packed.padded_bounds", whole_rows)
        with pytest.raises(TrainingError, match="qwen3 does not keep packed documents apart"):
            check_model(loss)


def test_a_model_that_sees_the_future_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def not_causal(*tensors: Any, **options: Any) -> Any:
        return sdpa(*tensors, **{**options, "is_causal": False})

    loss = PackedLoss(made(FAMILIES["llama"], "packed"))
    monkeypatch.setattr("expertflow.train.model.attention.scaled_dot_product_attention", not_causal)
    with pytest.raises(TrainingError, match="llama does not keep packed documents apart"):
        check_model(loss)


def test_states_that_are_no_numbers_are_refused() -> None:
    net = made(FAMILIES["llama"], "packed")
    with torch.no_grad():
        net.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="off by nan"):
        check_model(PackedLoss(net))


def test_an_adapter_on_the_head_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    net = get_peft_model(made(FAMILIES["llama"], "packed"), config)
    with pytest.raises(TrainingError, match=r"not a plain linear map; take it out of"):
        check_model(PackedLoss(net))
