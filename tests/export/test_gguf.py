"""A GGUF file holds the merged model, read back; what cannot be written has a reason."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LAYOUT, VOCAB_SIZE, export, trained, whole_hash, write_base
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from expertflow.export import gguf_file
from expertflow.export.gguf_file import ALLOWED, write_gguf
from expertflow.export.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    SPLITS,
    UNUSED,
    USER_DEFINED,
    NotWritable,
    read_vocabulary,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
}


def gguf() -> Any:
    return pytest.importorskip("gguf", reason="see envs/requirements-gguf.lock")


def family(folder: Path, name: str, **changes: Any) -> Path:
    model_class, config_class = FAMILIES[name]
    return write_base(folder, model_class=model_class, config_class=config_class, **changes)


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_back_is_the_merged_model(tmp_path: Path, name: str, dtype: str) -> None:
    gguf()
    base = family(tmp_path / "base", name, tie_word_embeddings=name != "llama")
    what = trained(base, base, whole_hash(base), method="full")
    record = export(what, tmp_path / "merged", gguf=dtype)
    assert record.unavailable == {} and record.gguf is not None
    assert record.gguf.path == str(tmp_path / "merged" / f"e-{dtype}.gguf")
    assert Path(record.gguf.path).stat().st_size == record.gguf.n_bytes
    assert record.gguf.max_relative_difference <= ALLOWED[dtype]
    assert (record.gguf.max_relative_difference == 0) == (dtype == "f32")


def test_a_file_says_what_kind_of_model_it_is(tmp_path: Path) -> None:
    package = gguf()
    folder = family(tmp_path, "qwen3", vocab_size=VOCAB_SIZE + 7)
    record, reason = write_gguf(folder, dtype="q8_0", name="e", shown_in=folder, layout=LAYOUT)
    assert record is not None and reason is None
    reader = package.GGUFReader(record.path)
    told = {name: field.contents() for name, field in reader.fields.items()}
    wanted = {
        "general.architecture": "qwen3", "general.name": "e", "general.file_type": 7,
        "qwen3.block_count": 2, "qwen3.embedding_length": 32, "qwen3.feed_forward_length": 64,
        "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 8, "qwen3.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": LAYOUT.chat_template,
    }  # fmt: skip
    assert {key: told[key] for key in wanted} == wanted
    tokens = told["tokenizer.ggml.tokens"]
    assert len(tokens) == len(told["tokenizer.ggml.token_type"]) == VOCAB_SIZE + 7
    assert tokens[told["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    # Norms, and rows that are no multiple of a block, keep more bits; a tied head is not repeated.
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32" and kinds["blk.1.ffn_down.weight"] == "Q8_0"
    assert "output.weight" not in kinds


def test_rows_that_fill_no_block_stay_in_16_bits(tmp_path: Path) -> None:
    package = gguf()
    folder = family(tmp_path, "llama", hidden_size=48, intermediate_size=64)
    record, _ = write_gguf(folder, dtype="q8_0", name="e", shown_in=folder, layout=LAYOUT)
    assert record is not None
    kinds = {t.name: t.tensor_type.name for t in package.GGUFReader(record.path).tensors}
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.0.ffn_down.weight"]) == ("F16", "Q8_0")


def test_a_damaged_file_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = gguf()
    right = package.quantize

    def wrong(values: Any, kind: Any) -> Any:
        return right(values * 1.1, kind)

    folder = family(tmp_path, "qwen3")
    monkeypatch.setattr(package, "quantize", wrong)
    record, reason = write_gguf(folder, dtype="f32", name="e", shown_in=folder, layout=LAYOUT)
    assert record is None and reason is not None and "read back as f32, were off by" in reason
    assert not list(folder.glob("*.gguf"))


def test_without_the_package_the_export_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    base = family(tmp_path / "base", "qwen3")
    what = trained(base, base, whole_hash(base), method="full")
    record = export(what, tmp_path / "merged", gguf="f16")
    assert record.gguf is None and "envs/requirements-gguf.lock" in record.unavailable["gguf"]


def test_a_file_that_is_not_asked_for_has_no_reason_to_be_missing(tmp_path: Path) -> None:
    base = family(tmp_path / "base", "qwen3")
    record = export(trained(base, base, whole_hash(base), method="full"), tmp_path / "merged")
    assert record.gguf is None and record.unavailable == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_class": MistralForCausalLM, "config_class": MistralConfig}, "mistral models"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "scales its positions .linear.",
        ),
        ({"attention_bias": True}, "has biases"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
    ],
)
def test_models_that_were_not_verified_are_not_written(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    gguf()
    folder = write_base(tmp_path, **changes)
    record, reason = write_gguf(folder, dtype="f32", name="e", shown_in=folder, layout=LAYOUT)
    assert record is None and reason is not None
    assert re.search(words, reason), reason


def split_by(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}  # fmt: skip
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


@pytest.mark.parametrize("expression", SPLITS)
def test_splitting_rules_are_known_by_their_expression(tmp_path: Path, expression: str) -> None:
    folder = family(tmp_path, "qwen3")
    name = SPLITS[expression]

    def change(settings: dict[str, Any]) -> None:
        settings["pre_tokenizer"] = split_by(expression)
        settings["model"]["ignore_merges"] = name == "llama-bpe"

    edit_tokenizer(folder, change)
    assert read_vocabulary(folder, vocab_size=VOCAB_SIZE, layout=LAYOUT).pre_tokenizer == name


def test_tokens_are_marked_as_what_they_are(tmp_path: Path) -> None:
    folder = family(tmp_path, "qwen3")

    def change(settings: dict[str, Any]) -> None:
        top = max(settings["model"]["vocab"].values())
        token = {"id": top + 1, "content": "<tool>", "special": False, "normalized": False,
                 "lstrip": False, "rstrip": False, "single_word": False}  # fmt: skip
        settings["added_tokens"].append(token)

    n_known = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    edit_tokenizer(folder, change)
    vocabulary = read_vocabulary(folder, vocab_size=VOCAB_SIZE + 30, layout=LAYOUT)
    kinds = dict(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    assert kinds["<|im_end|>"] == CONTROL and kinds["a"] == NORMAL
    assert kinds["<tool>"] == USER_DEFINED
    assert vocabulary.kinds[n_known + 1 :] == (UNUSED,) * (VOCAB_SIZE + 29 - n_known)
    assert vocabulary.special_ids["eos"] == vocabulary.tokens.index("<|im_end|>")
    assert "bos" not in vocabulary.special_ids and not vocabulary.adds_bos


def test_a_first_token_that_the_tokenizer_adds_is_told(tmp_path: Path) -> None:
    folder = family(tmp_path, "qwen3")

    def change(settings: dict[str, Any]) -> None:
        special = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        piece = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                 {"Sequence": {"id": "A", "type_id": 0}}]  # fmt: skip
        settings["post_processor"] = {
            "type": "TemplateProcessing", "single": piece,
            "pair": [*piece, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_start|>": special},
        }  # fmt: skip

    edit_tokenizer(folder, change)
    layout = replace(LAYOUT, bos="<|im_start|>")
    vocabulary = read_vocabulary(folder, vocab_size=VOCAB_SIZE, layout=layout)
    assert vocabulary.adds_bos and not vocabulary.adds_eos


def set_in(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(settings: dict[str, Any]) -> None:
        for parent in parents:
            settings = settings[parent]
        settings[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_in("decoder", {"type": "Metaspace"}), "only byte-level BPE is written"),
        (set_in("model.byte_fallback", True), "uses byte_fallback"),
        (set_in("normalizer", {"type": "Lowercase"}), "uses Lowercase"),
        (set_in("pre_tokenizer", split_by("x+")), "a rule that llama.cpp has no name for"),
        (set_in("pre_tokenizer.add_prefix_space", True), "has no name for"),
        (set_in("model.ignore_merges", True), "splits texts as gpt-2 but treats whole words"),
    ],
)
def test_tokenizers_that_gguf_cannot_say_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    folder = family(tmp_path, "qwen3")
    edit_tokenizer(folder, change)
    with pytest.raises(NotWritable, match=words):
        read_vocabulary(folder, vocab_size=VOCAB_SIZE, layout=LAYOUT)


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = family(tmp_path, "qwen3")
    with pytest.raises(NotWritable, match="the model 200 tokens"):
        read_vocabulary(folder, vocab_size=200, layout=LAYOUT)
