"""Embedding and head trained in full beside an adapter: saved with it, merged, loaded elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from safetensors.torch import load_file
from support import LORA
from test_model_families import FAMILIES, train
from tiny_models import ATTENTION, VOCAB_SIZE, export, load, trained, write_base
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

BOTH: tuple[Whole, ...] = ("embed_tokens", "lm_head")
WHOLE = replace(LORA, targets=(ALL_LINEAR,), dropout=0.0, modules_to_save=BOTH)
QLORA = pytest.param("qlora", marks=pytest.mark.extra("bitsandbytes"))
CASES = [
    # Tied, what is named, and how many matrices of the vocabulary are trained.
    (False, BOTH, 2),
    (False, ("lm_head",), 1),
    (False, ("embed_tokens",), 1),
    (True, BOTH, 1),
    (True, ("lm_head",), 1),
    (True, ("embed_tokens",), 1),
]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.arange(5, 35)[None]
        return model.eval()(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.parametrize(("tied", "named", "n_matrices"), CASES)
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
    losses = train(net)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, before[name]) for name, p in whole.items())

    net.save_pretrained(tmp_path / "adapter")
    what = trained(tmp_path / "adapter", base, weights_sha256(net))
    exported = export(what, tmp_path / "merged")
    assert exported.max_logit_difference < 1e-4
    net.get_base_model().set_attn_implementation("eager")
    expected = logits(net)
    merged = plain(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    elsewhere = PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(elsewhere), expected)
    # The base itself is as it was.
    with elsewhere.disable_adapter():
        torch.testing.assert_close(logits(elsewhere), logits(plain(base)))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(
    "method", ["lora", pytest.param("qlora", marks=pytest.mark.extra("bitsandbytes"))]
)
@pytest.mark.parametrize("tied", [False, True])
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
        losses = train(net)
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


@pytest.mark.parametrize("name", ["Phi-1.5, Phi-2", "Gemma 2", "Cohere"])
def test_families_with_biases_caps_and_scales_have_them_too(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(FAMILIES[name].config).save_pretrained(base)
    save_tokenizer(train_tokenizer(["some text"], vocab_size=VOCAB_SIZE), base)
    net = add_adapter(load_base(str(base), dtype=torch.float32, attention_name="packed"), WHOLE)
    losses = train(net)
    assert losses[-1] < losses[0]
    net.save_pretrained(tmp_path / "adapter")
    what = trained(tmp_path / "adapter", base, weights_sha256(net))
    assert export(what, tmp_path / "merged").max_logit_difference < 1e-4
    net.get_base_model().set_attn_implementation("eager")
    torch.testing.assert_close(
        logits(plain(tmp_path / "merged")), logits(net), atol=1e-4, rtol=1e-4
    )


def test_a_tied_embedding_that_peft_does_not_know_is_refused() -> None:
    net = AutoModelForCausalLM.from_config(FAMILIES["GPT-2"].config)
    with pytest.raises(TrainingError, match="the embedding of gpt2 is its head too"):
        add_adapter(net, WHOLE)
