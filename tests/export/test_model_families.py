"""Each family of docs/models.md trains, is saved, merged, and loaded by plain transformers."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from support import LORA, pair
from tiny_models import VOCAB_SIZE, export, held_out_rows, trained

from expertflow.data.layout import CHATML, chatml_layout
from expertflow.data.render import Renderer
from expertflow.plan.settings import ALL_LINEAR
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer
from expertflow.train.feed.batches import Collator
from expertflow.train.model.base import read_facts
from expertflow.train.model.load import add_adapter, load_base
from expertflow.train.model.packed import PackedLoss
from expertflow.train.model.self_check import check_model
from expertflow.train.model.weights import weights_sha256

NAMES = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = NAMES | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
CAPPED = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
TURNS = (
    "{%% for m in messages %%}%s{{ m.role }}%s{{ m.content }}%s{%% endfor %%}"
    "{%% if add_generation_prompt %%}%sassistant%s{%% endif %%}"
)


def turns(before: str, after: str, end: str) -> str:
    """Return a template in which a role stands between two marks and a turn ends with a third."""
    return TURNS % (before, after, end, before, after)


HEADERS = turns("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
GEMMA = turns("<start_of_turn>", "\n", "<end_of_turn>\n").replace(
    "{{ m.role }}", "{{ 'model' if m.role == 'assistant' else m.role }}"
)
GEMMA = GEMMA.replace(">assistant\n", ">model\n")
PHI = turns("<|", "|>\n", "<|end|>\n")
OLMO = turns("<|", "|>\n", "{{ eos_token if m.role == 'assistant' else '\n' }}")
GRANITE = turns("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n")
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


class Family(NamedTuple):
    """A tiny model, the style of its chats, the mark that ends an answer."""

    config: Any
    template: str = CHATML
    end: str = "<|im_end|>"


FAMILIES = {
    "Qwen 2.5": Family(transformers.Qwen2Config(**SMALL)),
    "Qwen 3": Family(transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "Llama 3": Family(transformers.LlamaConfig(**SMALL), HEADERS, "<|eot_id|>"),
    "Mistral": Family(transformers.MistralConfig(**SMALL, sliding_window=8), MISTRAL, "</s>"),
    "Gemma 1": Family(transformers.GemmaConfig(**SMALL, head_dim=8), GEMMA, "<end_of_turn>"),
    "Gemma 2": Family(
        transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8, **CAPPED),
        GEMMA,
        "<end_of_turn>",
    ),
    "Gemma 3": Family(
        transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8), GEMMA, "<end_of_turn>"
    ),
    "Phi-3, Phi-4": Family(transformers.Phi3Config(**SMALL), PHI, "<|end|>"),
    "Phi-1.5, Phi-2": Family(transformers.PhiConfig(**SMALL)),
    "OLMo 2": Family(transformers.Olmo2Config(**SMALL), OLMO, "</s>"),
    "Granite": Family(
        transformers.GraniteConfig(
            **SMALL, logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22,
            attention_multiplier=0.1,
        ),
        GRANITE,
        "<|end_of_text|>",
    ),
    "Cohere": Family(transformers.CohereConfig(**SMALL)),
    "SmolLM 3": Family(transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=2)),
    "StarCoder 2": Family(transformers.Starcoder2Config(**SMALL)),
    "GPT-2": Family(
        transformers.GPT2Config(**NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_merges_and_loads_elsewhere(name: str, tmp_path: Path) -> None:
    base, folder, merged = (tmp_path / part for part in ("base", "adapter", "merged"))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[name].config).save_pretrained(base)
    save_tokenizer(train_tokenizer(["some text"], vocab_size=VOCAB_SIZE), base)
    assert read_facts(base).n_layers == 2

    net = load_base(str(base), dtype=torch.float32, attention_name="packed")
    assert check_model(PackedLoss(net)).startswith("model checked")
    linear = list_products(net) - {"lm_head"}
    net = add_adapter(net, replace(LORA, targets=(ALL_LINEAR,), dropout=0.0))
    adapted = {name for name, m in net.named_modules() if hasattr(m, "lora_A")}
    assert {name.removeprefix("base_model.model.") for name in adapted} == linear
    losses = train(net)
    assert losses[-1] < losses[0]
    net.save_pretrained(folder)
    exported = export(trained(folder, base, weights_sha256(net)), merged)
    assert exported.max_logit_difference < 1e-4

    plain = transformers.AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    ids = torch.arange(5, 35)[None]
    net.get_base_model().set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (m.eval()(input_ids=ids, use_cache=False).logits for m in (plain, net))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def list_products(net: torch.nn.Module) -> set[str]:
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    return {name for name, module in net.named_modules() if isinstance(module, kinds)}


def train(net: Any) -> list[float]:
    loss = PackedLoss(net.train())
    batch = Collator(held_out_rows()).batch(np.arange(5))
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(8):
        value = loss(batch) / batch.n_target_tokens
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_answers_are_learned_with_their_ends(name: str) -> None:
    _, template, end = FAMILIES[name]
    layout = replace(
        chatml_layout(), chat_template=template, chat_template_origin="tokenizer", eos="</s>",
        special_tokens=tuple({end, "</s>", "<|im_start|>"}),
    )  # fmt: skip
    segments = Renderer(layout).render(pair("Which?", "This."))
    learned = [s.text[a:b] for s in segments for a, b in s.learned]
    assert [text.strip() for text in learned] == ["This.", end]
    assert "Which?" in "".join(s.text for s in segments)
