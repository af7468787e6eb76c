"""The exported model says what the trained one says, and loads with transformers alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LORA
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from expertflow.core.errors import TrainingError
from expertflow.data.layout import chatml_layout
from expertflow.export import merge
from expertflow.export.merge import ATTENTION, MAX_LOSS_DIFFERENCE, ask, export_model
from expertflow.export.records import ExportRecord
from expertflow.tokens.arrow import PackedRows, packed_rows
from expertflow.train import quantise
from expertflow.train.load import add_adapter, load_base, load_for_export
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


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    """Five rows; the first one has nothing to predict."""
    ids = np.random.default_rng(0).integers(0, 300, (5, 24)).astype(np.int32)
    return packed_rows(ids, [[24], *[[14, 10]] * 4], [[], *[[2, 14, 16, 24]] * 4])


def adapter(base: Path, folder: Path, method: str, *, use_dora: bool) -> Path:
    """Save an adapter with random weights, as training leaves one."""
    model = load_base(
        str(base), dtype=torch.float32, attention_name=ATTENTION, quantised=method == "qlora"
    )
    targets = ("q_proj", "v_proj", "down_proj")
    wrapped = add_adapter(model, replace(LORA, use_dora=use_dora, targets=targets))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    wrapped.save_pretrained(folder)
    return folder


def load(checkpoint: Path, base: Path, method: str = "lora", precision: str = "fp32") -> Any:
    return load_for_export(
        checkpoint, base=str(base), method=method, precision=precision, attention_name=ATTENTION
    )


def export(
    checkpoint: Path,
    base: Path,
    rows: PackedRows,
    output: Path,
    method: str = "lora",
    **changes: Any,
) -> ExportRecord:
    settings: dict[str, Any] = {
        "load_model": lambda: load(checkpoint, base, method), "decoding": GREEDY, **changes
    }  # fmt: skip
    return export_model(
        expert="e", checkpoint=checkpoint, rows=rows, tokenizer=base, layout=LAYOUT,
        card={**CARD, "method": method}, output=output, **settings,
    )  # fmt: skip


def plain(folder: Path) -> Any:
    """Load as anyone does, with transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def needs(method: str) -> None:
    if method == "qlora" and quantise.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed; see envs/requirements-bitsandbytes.lock")


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_merged_adapter_says_the_same(
    base: Path, rows: PackedRows, tmp_path: Path, method: str, use_dora: bool
) -> None:
    needs(method)
    trained = adapter(base, tmp_path / "adapter", method, use_dora=use_dora)
    record = export(trained, base, rows, tmp_path / "merged", method)
    ids = torch.arange(20)[None]
    merged = plain(tmp_path / "merged")
    untrained = load(base, base)(input_ids=ids).logits
    expected = load(trained, base, method)(input_ids=ids).logits
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - untrained).abs().max() > 0.1
    assert record.merged_into == ("base" if method == "lora" else "dequantised base")
    assert record.max_logit_difference < 1e-3
    assert record.loss_after_merge == pytest.approx(record.loss_before_merge, abs=1e-5)
    assert record.n_rows_compared == 4
    assert not merged.generation_config.do_sample
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"{record.loss_before_merge:.6g} and {record.loss_after_merge:.6g} (4 rows)" in card


def test_what_was_trained_on_4_bits_is_published_in_full_precision(
    base: Path, rows: PackedRows, tmp_path: Path
) -> None:
    needs("qlora")
    trained = adapter(base, tmp_path / "adapter", "qlora", use_dora=False)
    record = export(
        trained, base, rows, tmp_path / "merged", "qlora",
        load_model=lambda: load(trained, base, "qlora", "bf16"),
    )  # fmt: skip
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == record.dtype == "float32"
    merged = plain(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert not quantise.is_quantised(merged)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "as its 4 bits hold it, dequantised; float32" in card
    assert "both scored on the base in 4 bits" in card


def test_the_export_reads_the_base_in_the_precision_of_training(
    base: Path, rows: PackedRows, tmp_path: Path
) -> None:
    """The 4-bit codes depend on it, and an adapter fits but those it was trained on."""
    needs("qlora")
    trained = adapter(base, tmp_path / "adapter", "qlora", use_dora=False)
    loaded = load(trained, base, "qlora", "bf16")
    half = load_base(str(base), dtype=torch.bfloat16, attention_name=ATTENTION, quantised=True)
    codes = [dict(quantise.quantised_layers(m)) for m in (loaded.unload(), half)]
    assert all(torch.equal(codes[0][name].weight, layer.weight) for name, layer in codes[1].items())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32, torch.uint8}


def test_an_adapter_trained_on_4_bits_does_not_fit_the_original_base(
    base: Path, rows: PackedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("qlora")
    trained = adapter(base, tmp_path / "adapter", "qlora", use_dora=False)
    original = load(trained, base, "lora")
    losses = [ask(model, rows).loss for model in (load(trained, base, "qlora"), original)]
    assert abs(losses[1] - losses[0]) > 2 * MAX_LOSS_DIFFERENCE
    monkeypatch.setattr(merge, "mergeable", lambda model, checkpoint: original)
    with pytest.raises(TrainingError, match="merging moved the held-out loss"):
        export(trained, base, rows, tmp_path / "merged", "qlora")
    assert not (tmp_path / "merged").exists()


def test_an_exported_model_carries_tokenizer_card_and_decoding(
    base: Path, rows: PackedRows, tmp_path: Path
) -> None:
    decoding = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    record = export(base, base, rows, tmp_path / "merged", "full", decoding=decoding)
    assert record.merged_into is None
    assert record.loss_after_merge == record.loss_before_merge
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged", local_files_only=True)
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    model = plain(tmp_path / "merged")
    assert model.generation_config.top_k == 5
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "Made by the demo preset" in card and "| exact_match | not measured | 0.5 |" in card


@pytest.mark.parametrize("limit", ["MAX_LOSS_DIFFERENCE", "MAX_LOGIT_DIFFERENCE"])
def test_a_damaged_merge_is_not_published(
    base: Path, rows: PackedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    trained = adapter(base, tmp_path / "adapter", "lora", use_dora=False)
    monkeypatch.setattr(merge, limit, -1.0)
    with pytest.raises(TrainingError, match="merging moved the held-out loss"):
        export(trained, base, rows, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
