"""Packed rows train like documents in each family's own code, on every attention route."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from support import LORA
from torch.nn import functional

from expertflow.core.errors import TrainingError
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Batch, Collator
from expertflow.train.model import attention
from expertflow.train.model.load import add_adapter
from expertflow.train.model.packed import PackedLoss, causal_lm
from expertflow.train.model.self_check import check_model

LENGTH = 32
# Two rows; the second is padded. Supervised: the tails of the documents.
LENGTHS = [[10, 7, 15], [20, 5]]
SPANS = [[4, 10, 12, 17, 20, 32], [0, 20, 22, 25]]
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# The windows are shorter than most of the documents.
FAMILIES: dict[str, Any] = {
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen2.5": transformers.Qwen2Config(**SMALL),
    "qwen2, window in two layers": transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "llama": transformers.LlamaConfig(**SMALL),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=4),
    "smollm3": transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=4),
    "gemma2, scores and logits capped": transformers.Gemma2Config(
        **SMALL,
        head_dim=8,
        sliding_window=4,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "granite, logits divided": transformers.GraniteConfig(**SMALL, logits_scaling=8.0),
    "cohere, logits multiplied": transformers.CohereConfig(**SMALL),
    "phi, a head with a bias": transformers.PhiConfig(**SMALL),
}
ROUTES = ("packed", "sdpa", "eager")
# Family, route, with an adapter, with checkpointed layers: the layers of a family differ
# between routes; the effects of adapters and checkpoints hardly differ between families.
PAIRS = [
    (family, route)
    for family in FAMILIES
    for route in ROUTES
    if "scores" not in family or route != "sdpa"  # no kernel caps scores
]
CASES = [
    *((*pair, False, False) for pair in PAIRS),
    *((family, "packed", True, True) for family in FAMILIES),
    *(("qwen3", route, *how) for route in ROUTES for how in ((False, True), (True, False))),
    *(("qwen3", route, True, True) for route in ("sdpa", "eager")),
]


@pytest.fixture
def rows() -> PackedRows:
    ids = np.random.default_rng(0).integers(0, 97, (2, LENGTH)).astype(np.int32)
    return PackedRows.from_lists(ids, LENGTHS, SPANS)


@pytest.fixture
def batch(rows: PackedRows) -> Batch:
    return Collator(rows).batch(np.arange(2))


def made(config: Any, route: str, *, adapter: bool = False, checkpointing: bool = False) -> Any:
    """Make a random model; weights are large enough for attention to matter."""
    torch.manual_seed(0)
    # A copy, because attention is stored in the config, which two models must not share.
    model = transformers.AutoModelForCausalLM.from_config(
        deepcopy(config), attn_implementation=attention.transformers_name(route)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2, generator=generator)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    net = add_adapter(model, replace(LORA, dropout=0.0)) if adapter else model
    with torch.no_grad():  # an adapter starts at zero, where its gradients would hide a mistake
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=generator)
    return net.train()


def by_documents(net: Any, batch: Batch) -> torch.Tensor:
    lm, total = causal_lm(net), torch.zeros(())
    ids, labels = batch.input_ids_BL.flatten(), batch.labels_BL.flatten().long()
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        logits = lm(input_ids=ids[None, start:end].long(), use_cache=False).logits[0]
        total = total + functional.cross_entropy(
            logits[:-1], labels[start + 1 : end], reduction="sum", ignore_index=-100
        )
    return total


@pytest.mark.long
@pytest.mark.parametrize(("family", "route", "adapter", "checkpointing"), CASES)
def test_a_packed_batch_passes_the_check_and_trains_like_its_documents(
    batch: Batch, family: str, route: str, adapter: bool, checkpointing: bool
) -> None:
    packed = made(FAMILIES[family], route, adapter=adapter, checkpointing=checkpointing)
    alone = made(FAMILIES[family], "eager", adapter=adapter)
    assert packed.config._attn_implementation == route
    assert check_model(PackedLoss(packed)).startswith("model checked")
    loss, expected = PackedLoss(packed)(batch), by_documents(alone, batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-5)
    trained = 0
    for (name, p), q in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, atol=2e-3, rtol=1e-3, msg=name)
            trained += 1
    assert trained == (16 if adapter else sum(1 for _ in alone.parameters()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GptOssConfig(**SMALL), "GptOssAttention needs s_aux"),
        (transformers.StableLmConfig(**SMALL), "StableLmAttention received no document lengths"),
        (transformers.RecurrentGemmaConfig(**SMALL), "linear_attention layers"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_family_that_would_train_as_another_model_is_rejected(config: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        check_model(PackedLoss(made(config, "packed")))


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BOUNDS = torch.tensor([0, 10, 17, 32, 52, 57, 64, 64, 64], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS.tolist())]).view(2, 32)
MODULE = torch.nn.Identity()


def heads(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 32, 8, generator=generator).to(dtype) for n in (4, 2, 2)]


def dense(window: int | None, scaling: float) -> torch.Tensor:
    query, key, value = heads()
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    document = (POSITIONS == 0).cumsum(1)
    seen = document[:, :, None] == document[:, None, :]
    far = torch.arange(32)[:, None] - torch.arange(32)[None, :]
    seen &= (far >= 0) & (far < (window or 32))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def newest(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, *_: Any,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute the same as torch's kernel, slowly."""
    left, right = window_size
    n_times = query.shape[1] // key.shape[1]
    assert n_times == 1 or enable_gqa, "heads differ in number"
    key, value = (t.repeat_interleave(n_times, dim=1) for t in (key, value))
    place = torch.arange(len(query))
    document = torch.searchsorted(bounds, place.int(), right=True)
    far = place[:, None] - place[None, :]
    seen = document[:, None] == document[None, :]
    seen &= (far <= left) | torch.tensor(left == -1)
    seen &= (-far <= right) | torch.tensor(right == -1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float())
    scores *= scale or query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("window", [None, 5, 32])
def test_one_call_per_document_attends_within_it(
    monkeypatch: pytest.MonkeyPatch, window: int | None, scaling: float | None, own_heads: bool
) -> None:
    usual = attention.scaled_dot_product_attention

    def sdpa(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options["enable_gqa"] is not own_heads
        return usual(*tensors, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(attention, "needs_own_heads", lambda _: own_heads)
    out, _ = attention.attention_forward(
        MODULE, *heads(), None, scaling=scaling, sliding_window=window, document_bounds=BOUNDS
    )
    torch.testing.assert_close(out, dense(window, scaling or 8**-0.5))


@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("window", [None, 5, 32])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "torch 2.11"])
def test_every_release_of_the_kernel_is_called_correctly(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, window: int | None, scaling: float | None
) -> None:
    monkeypatch.setattr(attention, "KERNEL", newest)
    monkeypatch.setattr(attention, "TAKES_GROUPED_HEADS", grouped)
    out, _ = attention.attention_forward(
        MODULE, *heads(torch.float16), None, scaling=scaling, sliding_window=window,
        cu_seq_lens_q=BOUNDS,
    )  # fmt: skip
    expected = dense(window, scaling or 8**-0.5)
    torch.testing.assert_close(out.float(), expected, atol=5e-3, rtol=5e-3)


def test_unsupported_features_are_rejected() -> None:
    for options, message in (
        ({"cu_seq_lens_q": BOUNDS, "softcap": 50.0}, "Identity needs softcap"),
        ({"s_aux": torch.zeros(4)}, "Identity needs s_aux"),
        ({"is_causal": False}, "Identity is not causal"),
        ({"document_bounds": None}, "Identity received no document lengths"),
        ({"cu_seq_lens_q": BOUNDS, "dropout": 0.1}, "needs attention dropout 0.1"),
    ):
        given: Any = {"document_bounds": BOUNDS, **options}
        with pytest.raises(TrainingError, match=message):
            attention.attention_forward(MODULE, *heads(), None, **given)


def test_a_route_that_cannot_run_here_is_rejected() -> None:
    varlen = "training.attention varlen: the variable-length"
    for name, message in (("varlen", varlen), ("flex", "no backward pass")):
        with pytest.raises(TrainingError, match=message):
            attention.describe_route(name, device=CPU, dtype=torch.bfloat16)


def test_the_kernel_runs_in_half_from_ampere_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype, problem in (
        ((8, 0), torch.bfloat16, None),
        ((9, 0), torch.float32, "not torch.float32"),
        ((7, 5), torch.float16, "Ampere or newer"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        found = attention.varlen_unavailable_reason(CUDA, dtype)
        assert found is None if problem is None else problem in str(found)
        said = attention.describe_route("packed", device=CUDA, dtype=dtype)
        assert said.startswith("variable-length kernel") == (problem is None)


def test_flash_3_is_used_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability[0])
    flash = "torch.nn.attention.activate_flash_attention_impl"
    monkeypatch.setattr(flash, asked.append)
    assert attention.activate_flash_3(CPU) == "no FlashAttention-3: it needs a Hopper card"
    assert attention.activate_flash_3(CUDA) == "no FlashAttention-3: it needs a Hopper card"
    capability[0] = (9, 0)
    assert attention.activate_flash_3(CUDA) == "FlashAttention-3" and asked == ["FA3"]

    def absent(_: str) -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(flash, absent)
    assert "cannot be loaded (No module named" in attention.activate_flash_3(CUDA)
    monkeypatch.setattr("torch.nn.attention.list_flash_attention_impls", lambda: [])
    assert "does not support it" in attention.activate_flash_3(CUDA)


def test_kernels_get_one_dtype_under_autocast(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3's norms produce fp32 queries with bf16 values; the kernel rejects a mixture."""
    seen: list[set[torch.dtype]] = []

    def kernel(*tensors: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append({tensor.dtype for tensor in tensors[:3]})
        return torch.zeros_like(tensors[0])

    monkeypatch.setattr(attention, "KERNEL", kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made(FAMILIES["qwen3"], "packed").base_model(
            input_ids=batch.input_ids_BL, position_ids=batch.position_ids_BL, use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens, max_length_q=batch.max_length,
        )  # fmt: skip
    assert seen == [{torch.bfloat16}] * 4


def test_labels_are_smoothed_in_training_only(batch: Batch) -> None:
    plain, smooth = (
        PackedLoss(made(FAMILIES["qwen3"], "packed"), label_smoothing=s) for s in (0.0, 0.3)
    )
    assert torch.equal(smooth.eval()(batch), plain.eval()(batch))
    assert smooth.train()(batch) != plain.train()(batch)


@pytest.mark.parametrize("autocast", [False, True])
def test_leaking_documents_are_rejected(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    def whole_rows(batch: Any, device: torch.device) -> torch.Tensor:
        n_rows, length = batch.input_ids_BL.shape
        return torch.arange(n_rows + 1, dtype=torch.int32) * length

    loss = PackedLoss(made(FAMILIES["qwen3"], "packed"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        check_model(loss)
        monkeypatch.setattr("expertflow.train.model.packed.document_bounds", whole_rows)
        with pytest.raises(TrainingError, match="qwen3 does not keep packed documents separate"):
            check_model(loss)


@pytest.mark.parametrize(("weight", "dtype"), [(float("nan"), "float32"), (1e6, "float16")])
def test_non_finite_states_are_rejected(weight: float, dtype: str) -> None:
    """Large activations that overflow fp16 are not a fault of attention."""
    net = made(FAMILIES["llama"], "packed")
    with torch.no_grad():
        net.model.layers[1].mlp.up_proj.weight[0, 0] = weight
    half = torch.autocast("cpu", dtype=torch.float16, enabled=dtype == "float16")
    with (
        half,
        pytest.raises(TrainingError, match=f"non-finite numbers in {dtype}; check its weights"),
    ):
        check_model(PackedLoss(net))


def test_an_adapter_on_the_head_is_rejected() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    net = get_peft_model(made(FAMILIES["llama"], "packed"), config)
    with pytest.raises(TrainingError, match=r"not a plain linear layer; remove it from"):
        check_model(PackedLoss(net))
