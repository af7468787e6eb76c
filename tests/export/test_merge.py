"""The exported model says what the trained one says, and loads with transformers alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LORA
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from expertflow.core.errors import TrainingError
from expertflow.data.layout import chatml_layout
from expertflow.export import merge
from expertflow.export.merge import export_model
from expertflow.train.load import add_adapter, load_base, load_trained
from expertflow.train.tokenizer import save_tokenizer, train_tokenizer

CARD: dict[str, Any] = {
    "expert": "e",
    "description": "Says <b>things</b>.",
    "base_model": "tiny",
    "base_licence": None,
    "method": "lora",
    "preset": "demo",
    "sources": [{"name": "s", "licence": None, "revision": None}],
    "scores": [("held-out loss", 2.0, 1.0), ("exact_match", None, 0.5)],
    "weights_sha256": "abc",
}
LAYOUT = chatml_layout()
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(train_tokenizer(["some text"], vocab_size=300), folder)
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    # Chat models come with sampling settings, which do not go with a greedy manifest.
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    model.save_pretrained(folder)
    return folder


def adapter(base: Path, folder: Path, *, use_dora: bool) -> Path:
    """Save an adapter with random weights, as training leaves one."""
    model = load_base(str(base), dtype=torch.float32, attention_name="sdpa")
    wrapped = add_adapter(model, replace(LORA, use_dora=use_dora))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    wrapped.save_pretrained(folder)
    return folder


def load(checkpoint: Path, base: Path) -> Any:
    return load_trained(
        checkpoint, base=str(base), dtype=torch.float32, attention_name="sdpa"
    ).eval()


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_merged_adapter_says_the_same(base: Path, tmp_path: Path, use_dora: bool) -> None:
    trained = adapter(base, tmp_path / "adapter", use_dora=use_dora)
    record = export_model(
        expert="e", model=load(trained, base), tokenizer=base, layout=LAYOUT,
        decoding=GREEDY, card=CARD,
        output=tmp_path / "merged",
    )  # fmt: skip
    ids = torch.arange(20)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    untrained = load(base, base)(input_ids=ids).logits
    expected = load(trained, base)(input_ids=ids).logits
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - untrained).abs().max() > 0.1
    assert record.merged and record.max_logit_difference < 1e-3
    assert not merged.generation_config.do_sample


def test_an_exported_model_carries_tokenizer_card_and_decoding(base: Path, tmp_path: Path) -> None:
    record = export_model(
        expert="e", model=load(base, base), tokenizer=base, layout=LAYOUT, card=CARD,
        decoding={"temperature": 0.7, "top_p": 0.9, "top_k": 5}, output=tmp_path / "merged",
    )  # fmt: skip
    assert not record.merged
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged", local_files_only=True)
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    assert model.generation_config.top_k == 5
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "Made by the demo preset" in card and "| exact_match | not measured | 0.5 |" in card


def test_a_damaged_merge_is_not_published(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = adapter(base, tmp_path / "adapter", use_dora=False)
    monkeypatch.setattr(merge, "MAX_LOGIT_DIFFERENCE", -1.0)
    with pytest.raises(TrainingError, match="merging moved the logits"):
        export_model(
            expert="e", model=load(trained, base), tokenizer=base, layout=LAYOUT,
        decoding=GREEDY, card=CARD,
            output=tmp_path / "merged",
        )  # fmt: skip
    assert not (tmp_path / "merged").exists()
