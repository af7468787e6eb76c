"""FLOPs against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from expertflow.plan.flops import flops_per_token
from expertflow.plan.records import LoraSpec, ModelFacts

FACTS = ModelFacts(
    n_layers=3,
    hidden_size=256,
    n_heads=8,
    n_kv_heads=4,
    head_dim=32,
    intermediate_size=512,
    vocab_size=4096,
    tie_word_embeddings=True,
    model_type="qwen3",
)
LORA = LoraSpec(
    r=8,
    alpha=16,
    dropout=0.0,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    use_dora=False,
    use_rslora=False,
)
LENGTH = 128


def counted(lora: LoraSpec | None) -> float:
    """Count one step over a row; the counter sees full attention, twice the causal one."""
    config = Qwen3Config(
        vocab_size=FACTS.vocab_size,
        hidden_size=FACTS.hidden_size,
        num_hidden_layers=FACTS.n_layers,
        num_attention_heads=FACTS.n_heads,
        num_key_value_heads=FACTS.n_kv_heads,
        head_dim=FACTS.head_dim,
        intermediate_size=FACTS.intermediate_size,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        peft = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.targets))
        model = get_peft_model(model, peft)
        # Without it, the lowest layer spares its input gradients: 1 layer of 3 here, of 28 there.
        model.enable_input_require_grads()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops() / LENGTH


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_flops_agree_with_torchs_counter(lora: LoraSpec | None) -> None:
    ours = flops_per_token(
        FACTS,
        lora=lora,
        mean_context_tokens=LENGTH,  # what the counter sees: no causal saving
        supervised_fraction=1.0,
        checkpoint_activations=False,
    )
    assert ours.model == pytest.approx(counted(lora), rel=0.01)


def test_checkpointing_counts_as_hardware_work_only() -> None:
    plain, again = (
        flops_per_token(
            FACTS,
            lora=LORA,
            mean_context_tokens=64,
            supervised_fraction=0.3,
            checkpoint_activations=on,
        )
        for on in (False, True)
    )
    assert again.model == plain.model
    assert again.hardware > plain.hardware
