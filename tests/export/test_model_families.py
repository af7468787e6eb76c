"""Each family of docs/models.md trains, is saved, merged, and loaded by plain transformers.

Likewise for embedding and head trained in full along with an adapter.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from peft import PeftModel
from safetensors.torch import load_file
from support import LORA, train_on
from tiny_models import ATTENTION, VOCAB_SIZE, export, held_out_rows, load, trained, write_base
from transformers import AutoModelForCausalLM

from expertflow.core.errors import TrainingError
from expertflow.plan.flops import count_trained_weights
from expertflow.plan.settings import ALL_LINEAR, Whole
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer
from expertflow.train.model.base import read_facts
from expertflow.train.model.load import add_adapter, load_base
from expertflow.train.model.packed import PackedLoss, find_head
from expertflow.train.model.self_check import check_model
from expertflow.train.model.weights import list_trained_parameters, weights_sha256

NAMES = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = NAMES | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
CAPPED = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
FAMILIES: dict[str, Any] = {
    "Qwen 2.5": transformers.Qwen2Config(**SMALL),
    "Qwen 3": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "Llama 3": transformers.LlamaConfig(**SMALL),
    "Mistral": transformers.MistralConfig(**SMALL, sliding_window=8),
    "Gemma 1": transformers.GemmaConfig(**SMALL, head_dim=8),
    "Gemma 2": transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8, **CAPPED),
    "Gemma 3": transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8),
    "Phi-3, Phi-4": transformers.Phi3Config(**SMALL),
    "Phi-1.5, Phi-2": transformers.PhiConfig(**SMALL),
    "OLMo 2": transformers.Olmo2Config(**SMALL),
    "Granite": transformers.GraniteConfig(
        **SMALL, logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.1,
    ),
    "Cohere": transformers.CohereConfig(**SMALL),
    "SmolLM 3": transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "StarCoder 2": transformers.Starcoder2Config(**SMALL),
    "GPT-2": transformers.GPT2Config(**NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}  # fmt: skip


BOTH: tuple[Whole, ...] = ("embed_tokens", "lm_head")
ADAPTER = replace(LORA, targets=(ALL_LINEAR,), dropout=0.0)
WHOLE = replace(ADAPTER, modules_to_save=BOTH)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_merges_and_loads_elsewhere(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[name]).save_pretrained(base)
    save_tokenizer(train_tokenizer(["some text"], vocab_size=VOCAB_SIZE), base)
    assert read_facts(base).n_layers == 2

    net = load_base(str(base), dtype=torch.float32, attention_name="packed")
    assert check_model(PackedLoss(net)).startswith("model checked")
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    linear = {name for name, m in net.named_modules() if isinstance(m, kinds)} - {"lm_head"}
    net = add_adapter(net, ADAPTER)
    adapted = {name for name, m in net.named_modules() if hasattr(m, "lora_A")}
    assert {name.removeprefix("base_model.model.") for name in adapted} == linear
    losses = train_on(net, held_out_rows(), n_steps=8)
    assert losses[-1] < losses[0]
    export_and_compare(net, base, tmp_path)


def export_and_compare(net: Any, base: Path, folder: Path) -> Any:
    """Save the adapter and export it; return the merged model, which has the same logits."""
    net.save_pretrained(folder / "adapter")
    what = trained(folder / "adapter", base, weights_sha256(net))
    assert export(what, folder / "merged").max_logit_difference < 1e-4
    net.get_base_model().set_attn_implementation("eager")
    merged = plain(folder / "merged")
    torch.testing.assert_close(logits(merged), logits(net), atol=1e-4, rtol=1e-4)
    return merged


# Whether tied, the modules named, and how many vocabulary matrices are trained.
NAMED = [
    (False, BOTH, 2),
    (False, ("lm_head",), 1),
    (False, ("embed_tokens",), 1),
    (True, ("lm_head",), 1),
    (True, ("embed_tokens",), 1),
]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.arange(5, 35)[None]
        return model.eval()(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.parametrize(("tied", "named", "n_matrices"), NAMED)
def test_they_are_trained_saved_and_merged(
    tmp_path: Path, tied: bool, named: tuple[Whole, ...], n_matrices: int
) -> None:
    base = write_base(tmp_path / "base", tie_word_embeddings=tied)
    lora = replace(WHOLE, modules_to_save=named)
    net = add_adapter(load_base(str(base), dtype=torch.float32, attention_name="packed"), lora)
    parameters = list_trained_parameters(net)
    whole = {name: p for name, p in parameters.items() if ".lora_" not in name}
    before = {name: p.detach().clone() for name, p in whole.items()}
    assert len(whole) == n_matrices
    counted = count_trained_weights(read_facts(base), lora)
    assert counted == sum(p.numel() for p in parameters.values())
    trains_head = tied or "lm_head" in named
    assert find_head(net.get_base_model()).weight_VH.requires_grad == trains_head
    assert check_model(PackedLoss(net)).startswith("model checked")
    losses = train_on(net, held_out_rows(), n_steps=8)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, before[name]) for name, p in whole.items())

    merged = export_and_compare(net, base, tmp_path)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    elsewhere = PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(elsewhere), logits(net))
    # The base itself is unchanged.
    with elsewhere.disable_adapter():
        torch.testing.assert_close(logits(elsewhere), logits(plain(base)))


# All pairs of values.
@pytest.mark.parametrize(
    ("method", "use_dora", "tied"),
    [
        ("lora", False, False),
        ("lora", True, True),
        pytest.param("qlora", False, True, marks=pytest.mark.extra("bitsandbytes")),
        pytest.param("qlora", True, False, marks=pytest.mark.extra("bitsandbytes")),
    ],
)
def test_on_a_base_in_half_precision_they_are_exact_in_fp32(
    tmp_path: Path, method: str, use_dora: bool, tied: bool
) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model = load_base(
        str(base), dtype=torch.bfloat16, attention_name=ATTENTION, quantized=method == "qlora"
    )
    net = add_adapter(model, replace(WHOLE, use_dora=use_dora))
    assert {p.dtype for p in list_trained_parameters(net).values()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = train_on(net, held_out_rows(), n_steps=8)
    assert losses[-1] < losses[0]
    net.save_pretrained(tmp_path / "adapter")
    sha256 = weights_sha256(net)
    what = trained(tmp_path / "adapter", base, sha256, method=method, precision="bf16")
    exported = export(what, tmp_path / "merged", dtype="fp32")
    assert exported.max_logit_difference < 1e-3
    written = load_file(tmp_path / "merged" / "model.safetensors")
    whole = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "model.embed_tokens.weight"
    assert torch.equal(written[name], whole[f"base_model.model.{name}"])
    expected = logits(load(what))
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, atol=1e-3, rtol=1e-3)


def test_a_tied_embedding_unknown_to_peft_is_rejected() -> None:
    net = AutoModelForCausalLM.from_config(FAMILIES["GPT-2"])
    with pytest.raises(TrainingError, match=r"embedding of gpt2 .*also its head"):
        add_adapter(net, WHOLE)
