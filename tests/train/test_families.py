"""Packed rows must train every family as its own code trains one document at a time."""

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

pytestmark = pytest.mark.long

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
# Family, route, with an adapter, with checkpointed layers: what the layers of a family do differs
# between routes, and what adapters and checkpoints do hardly between families.
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


def made(config: Any, route: str, *, adapter: bool = False, checkpointing: bool = False) -> Any:
    """Make a random model; weights are large enough for attention to matter."""
    torch.manual_seed(0)
    # A copy, for the attention is written into the config, which two models must not share.
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


@pytest.mark.parametrize(("family", "route", "adapter", "checkpointing"), CASES)
def test_a_packed_batch_trains_like_its_documents(
    rows: PackedRows, family: str, route: str, adapter: bool, checkpointing: bool
) -> None:
    packed = made(FAMILIES[family], route, adapter=adapter, checkpointing=checkpointing)
    alone = made(FAMILIES[family], "eager", adapter=adapter)
    assert packed.config._attn_implementation == route
    batch = Collator(rows).batch(np.arange(2))
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


@pytest.mark.parametrize(("family", "route"), PAIRS)
def test_the_self_check_passes(family: str, route: str) -> None:
    assert check_model(PackedLoss(made(FAMILIES[family], route))).startswith("model checked")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GptOssConfig(**SMALL), "GptOssAttention needs s_aux"),
        (transformers.StableLmConfig(**SMALL), "StableLmAttention got no document lengths"),
        (transformers.RecurrentGemmaConfig(**SMALL), "layers of linear_attention"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_family_that_would_train_as_another_model_is_refused(config: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message) as caught:
        check_model(PackedLoss(made(config, "packed")))
    assert "\n" not in str(caught.value)
