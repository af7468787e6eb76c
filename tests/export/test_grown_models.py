"""Models with added tokens: rows are added if there are too few, trained, merged, and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from support import train_on
from test_model_families import FAMILIES, WHOLE, export_and_compare, logits, plain
from tiny_models import VOCAB_SIZE, held_out_rows, write_base

from expertflow.tokens.records import TokenizerSpec
from expertflow.tokens.tokenizer import prepare_tokenizer, save_tokenizer, train_tokenizer
from expertflow.train.model.base import prepare_model
from expertflow.train.model.load import add_adapter, load_base, name_base
from expertflow.train.records import ModelRecord, ModelSpec

ADDED = ("<|sql|>", "<|schema|>")


def prepare(base: Path, folder: Path, added: tuple[str, ...] = ADDED) -> ModelRecord:
    common: dict[str, Any] = {"model": str(base), "revision": None, "content": {}}
    tokenizer = TokenizerSpec(
        **common, tokenizer=None, vocab_size=300, chat_template="auto",
        text_special_tokens="plain", added_tokens=added,
    )  # fmt: skip
    model = ModelSpec(
        **common, license=None, n_layers=1, hidden_size=16, n_heads=2, n_kv_heads=1, head_dim=8,
        intermediate_size=32, seed=0, added_tokens=added,
    )  # fmt: skip
    record = prepare_tokenizer(tokenizer, [], folder / "tokenizer")
    return prepare_model(model, record, folder / "base_model")


def full_tokenizer(folder: Path) -> None:
    """Write a tokenizer with as many tokens as the models have rows."""
    tokenizer = train_tokenizer(["some text"], vocab_size=VOCAB_SIZE)
    n = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<filler {i}>" for i in range(n)])
    save_tokenizer(tokenizer, folder)


def test_spare_rows_are_used_and_the_weights_stay_where_they_are(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    known, made = prepare(base, tmp_path / "known", ()), prepare(base, tmp_path / "made")
    assert (known.path, made.path) == (str(base), str(tmp_path / "made" / "base_model"))
    assert made.tokenizer.vocab_size == known.tokenizer.vocab_size + 2 < made.facts.vocab_size
    assert (made.weights_sha256, made.facts) == (known.weights_sha256, known.facts)
    assert (Path(made.path) / "model.safetensors").resolve() == base / "model.safetensors"
    torch.testing.assert_close(logits(plain(Path(made.path))), logits(plain(base)))


# Tied; with biases, caps and scales at embedding and head; of another layout.
@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen 3", "Phi-1.5, Phi-2", "Gemma 2", "Cohere", "GPT-2"])
def test_a_family_grows_by_means_trains_and_loads_elsewhere(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = tmp_path / "source"
    transformers.AutoModelForCausalLM.from_config(FAMILIES[name]).save_pretrained(
        source, max_shard_size="10KB"
    )
    full_tokenizer(source)
    made, again = (prepare(source, tmp_path / place) for place in ("made", "again"))
    assert made.weights_sha256 == again.weights_sha256
    assert made.facts.vocab_size == made.tokenizer.vocab_size == VOCAB_SIZE + 2
    grown, before = plain(Path(made.path)), plain(source)
    torch.testing.assert_close(logits(grown)[..., :VOCAB_SIZE], logits(before))
    layers = [(m.get_input_embeddings(), m.get_output_embeddings()) for m in (grown, before)]
    for new, old in zip(*layers, strict=True):
        for there, known in zip(new.parameters(), old.parameters(), strict=True):
            assert torch.equal(there[:VOCAB_SIZE], known)
            assert torch.equal(there[VOCAB_SIZE:], known.mean(0).expand_as(there[VOCAB_SIZE:]))
    if name == "GPT-2":  # Its embedding cannot be trained along with an adapter.
        return

    net = add_adapter(load_base(made.path, dtype=torch.float32, attention_name="packed"), WHOLE)
    losses = train_on(net, held_out_rows(), n_steps=8)
    assert losses[-1] < losses[0]
    net.name_or_path = net.config.name_or_path = made.path
    merged = export_and_compare(net, Path(made.path), tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(tokenizer) == merged.config.vocab_size == VOCAB_SIZE + 2
    assert tokenizer("<|schema|>").input_ids == [VOCAB_SIZE + 1]


def test_an_adapter_of_a_hub_model_finds_its_rows(tmp_path: Path) -> None:
    """It refers to the hub's model, to which peft adds rows for the tokenizer in its folder."""
    base = write_base(tmp_path / "base")
    full_tokenizer(base)
    made = prepare(base, tmp_path / "made")
    net = add_adapter(load_base(made.path, dtype=torch.float32, attention_name="eager"), WHOLE)
    train_on(net, held_out_rows(), n_steps=8)
    net.save_pretrained(tmp_path / "adapter")
    name_base(tmp_path / "adapter", replace(made, kind="hub"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "adapter" / name).write_bytes((Path(made.path) / name).read_bytes())
    elsewhere = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert elsewhere.peft_config["default"].base_model_name_or_path == str(base)
    torch.testing.assert_close(logits(elsewhere), logits(net), atol=1e-4, rtol=1e-4)


def test_half_precision_stays(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    full_tokenizer(base)
    made = prepare(base, tmp_path / "made")
    found = load_file(Path(made.path) / "model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert made.n_weight_bytes > 0 and "lm_head.weight" not in found
