"""A packed row must give what its documents give alone: logits, loss and gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_attention_routes import CPU, packed_batch
from transformers import Qwen3Config, Qwen3ForCausalLM

from expertflow.core.errors import TrainingError
from expertflow.plan.settings import LoraSpec
from expertflow.tokens.arrow import PackedRows, packed_rows
from expertflow.tokens.packing import IGNORE
from expertflow.train.feed.batches import Collator
from expertflow.train.model import attention
from expertflow.train.model.load import add_adapter, load_base
from expertflow.train.model.packed import PackedLoss, document_kwargs, padded_bounds

LENGTH = 32
# Two rows; the second is padded. Supervised: the tails of the documents.
LENGTHS = [[10, 7, 15], [20, 5]]
SPANS = [[4, 10, 12, 17, 20, 32], [0, 20, 22, 25]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def rows() -> PackedRows:
    ids = np.random.default_rng(0).integers(0, 97, (2, LENGTH)).astype(np.int32)
    return packed_rows(ids, LENGTHS, SPANS)


def load(folder: Path, name: str = attention.NAME) -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = load_base(str(folder), dtype=torch.float32, attention_name=name)
    return model


@pytest.mark.parametrize("route", [attention.NAME, "eager"])
def test_packed_logits_equal_separate_logits(folder: Path, rows: PackedRows, route: str) -> None:
    packed, alone = load(folder, route), load(folder, "sdpa")
    batch = Collator(rows).batch(np.arange(2))
    out = packed.base_model(
        input_ids=batch.input_ids_BL,
        position_ids=batch.position_ids_BL,
        use_cache=False,
        **document_kwargs(packed, batch, batch.position_ids_BL),
    ).last_hidden_state
    logits = packed.lm_head(out)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for n in lengths:
            document = batch.input_ids_BL[row : row + 1, start : start + n]
            expected = alone(input_ids=document, use_cache=False).logits[0]
            torch.testing.assert_close(
                logits[row, start : start + n], expected, atol=2e-5, rtol=1e-4
            )
            start += n


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_packed_gradients_equal_separate_gradients(
    folder: Path, rows: PackedRows, adapter: bool, checkpointing: bool
) -> None:
    packed, alone = (prepared(folder, adapter, checkpointing) for _ in range(2))
    PackedLoss(packed)(Collator(rows).batch(np.arange(2))).backward()
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for n in lengths:
            PackedLoss(alone)(single(rows, row, start, n)).backward()
            start += n
    n_compared = 0
    for (name, p), (_, q) in zip(packed.named_parameters(), alone.named_parameters(), strict=True):
        if p.requires_grad:
            assert p.grad is not None and q.grad is not None, name
            torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-3, msg=name)
            n_compared += 1
    assert n_compared > 5


def prepared(folder: Path, adapter: bool, checkpointing: bool) -> torch.nn.Module:
    model = load(folder)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if not adapter:
        return model
    lora = LoraSpec(
        r=4, alpha=8, dropout=0.0, targets=("q_proj", "v_proj"), use_dora=False, use_rslora=False
    )
    wrapped = add_adapter(model, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # an adapter starts at zero, where its gradients would hide a mistake
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped


def single(rows: PackedRows, row: int, start: int, n: int):  # type: ignore[no-untyped-def]
    """Make one document a row of its own."""
    ids = rows.parts_NL[0][row : row + 1, start : start + n]
    spans: list[int] = []
    for low, high in zip(rows.spans[row][::2], rows.spans[row][1::2], strict=True):
        low, high = max(low, start) - start, min(high, start + n) - start
        if low < high:
            spans += [low, high]
    return Collator(packed_rows(ids, [[n]], [spans])).batch(np.arange(1))


def test_no_document_learns_its_first_token(rows: PackedRows) -> None:
    batch = Collator(rows).batch(np.arange(2))
    starts = batch.position_ids_BL == 0
    assert (batch.labels_BL[starts] == IGNORE).all()
    # Row 2: 20 supervised tokens less the first, then 3; row 1: 6 + 5 + 12 (17-20 is not covered).
    assert batch.n_target_tokens == (6 + 5 + 12) + (19 + 3)
    assert batch.n_padding_tokens == 7


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


def test_attention_without_lengths_is_an_error(folder: Path) -> None:
    with pytest.raises(TrainingError, match="Qwen3Attention got no document lengths"):
        load(folder)(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)


def test_the_cuda_kernel_gets_one_dtype_under_autocast(
    folder: Path, rows: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms of Qwen3 give fp32 queries beside bf16 values; the kernel refuses a mixture."""
    seen: list[set[torch.dtype]] = []

    def kernel(*tensors: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append({tensor.dtype for tensor in tensors[:3]})
        return torch.zeros_like(tensors[0])

    monkeypatch.setattr(attention, "KERNEL", kernel)
    batch = Collator(rows).batch(np.arange(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        load(folder).base_model(
            input_ids=batch.input_ids_BL,
            position_ids=batch.position_ids_BL,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            max_length_q=batch.max_length,
        )
    assert seen == [{torch.bfloat16}] * 2


def test_labels_are_smoothed_in_training_only(folder: Path, rows: PackedRows) -> None:
    batch = Collator(rows).batch(np.arange(2))
    plain, smooth = (PackedLoss(load(folder), label_smoothing=s) for s in (0.0, 0.3))
    assert torch.equal(smooth.eval()(batch), plain.eval()(batch))
    assert smooth.train()(batch) != plain.train()(batch)
