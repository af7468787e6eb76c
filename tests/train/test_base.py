"""What a model record says of a directory of weights."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Starcoder2Config

from expertflow.data.layout import CHATML
from expertflow.train.model.base import prepare_model, read_facts, save_tokenizer, train_tokenizer
from expertflow.train.records import ModelSpec


def spec(model: str) -> ModelSpec:
    return ModelSpec(
        model=model, revision=None, licence=None, vocab_size=300, n_layers=1, hidden_size=16,
        n_heads=2, n_kv_heads=1, head_dim=8, intermediate_size=32, tokenizer=None, content={},
        chat_template="auto", text_special_tokens="plain", seed=0,
    )  # fmt: skip


def test_the_builtin_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    made = [prepare_model(spec("builtin:tiny-qwen3"), ["a b"], tmp_path / n) for n in "ab"]
    assert made[0].weights_sha256 == made[1].weights_sha256
    assert made[0].tokenizer_sha256 == made[1].tokenizer_sha256
    assert made[0].facts.n_layers == 1


def test_a_tied_head_that_is_stored_twice_counts_once(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    save_tokenizer(train_tokenizer(["a"], vocab_size=300), tmp_path)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    assert "lm_head.weight" in weights
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({"x": torch.zeros(5)}, tmp_path / "consolidated.safetensors")
    record = prepare_model(spec(str(tmp_path)), [], tmp_path / "out")
    assert record.n_parameters == sum(p.numel() for p in model.parameters())


def test_a_plain_mlp_has_two_matrices(tmp_path: Path) -> None:
    for config, n in ((Qwen3Config(), 3), (Starcoder2Config(), 2)):
        config.save_pretrained(tmp_path)
        assert read_facts(tmp_path).n_mlp_matrices == n


def test_the_record_says_how_the_model_writes_chats(tmp_path: Path) -> None:
    record = prepare_model(spec("builtin:tiny-qwen3"), ["a b"], tmp_path / "made")
    assert record.layout.chat_template == CHATML
    assert (record.layout.turn_end, record.layout.text_end) == ("<|im_end|>", "<|endoftext|>")
