"""FLOPs against torch's own counter, through the training's loss and attention."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig, PretrainedConfig, Qwen3Config, Starcoder2Config

from expertflow.plan.flops import (
    FlopsPerToken,
    adapter_weights,
    flops_doubts,
    flops_per_token,
    mlp_matrices,
)
from expertflow.plan.records import ModelFacts
from expertflow.plan.settings import LoraSpec
from expertflow.train.memory_trace import (
    TracedRun,
    as_on_card,
    build_model,
    materialize_weights,
    sample_batch,
)
from expertflow.train.model.packed import PackedLoss

FACTS = ModelFacts(
    n_layers=3, hidden_size=256, n_heads=8, n_kv_heads=4, head_dim=32, intermediate_size=512,
    vocab_size=4096, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
CONFIG = Qwen3Config(
    vocab_size=4096, hidden_size=256, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, head_dim=32, intermediate_size=512, tie_word_embeddings=True,
)  # fmt: skip
LORA = LoraSpec(
    r=8, alpha=16, dropout=0.0, use_dora=False, use_rslora=False,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
)  # fmt: skip
KINDS: dict[str, LoraSpec | None] = {
    "full": None,
    "lora": LORA,
    "dora": replace(LORA, use_dora=True),
    "dora with dropout": replace(LORA, use_dora=True, dropout=0.1),
}
DOCUMENTS = (700, 48, 200, 76)
SUM_LEN_SQ = sum(n * n for n in DOCUMENTS)
SUPERVISED = 0.25
ATEN, OWN = torch.ops.aten, torch.ops.torch_attn
PLAIN = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "intermediate_size": 512, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
WITHOUT_GATES: dict[str, tuple[PretrainedConfig, int, tuple[str, ...]]] = {
    "starcoder2": (
        Starcoder2Config(**PLAIN, num_key_value_heads=4), 4,
        ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
    ),
    "gpt_neox": (
        GPTNeoXConfig(**PLAIN), 8,
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
}  # fmt: skip


def _formulas(sum_len_sq: int) -> dict[Any, Any]:
    """Return the FLOPs of attention by kernel, and of a product in place, which torch leaves out.

    Attention counts as the convention has it: causal, within documents (``sum_len_sq`` sums their
    squared lengths, which tensors without data do not say), and twice the forward pass for the
    backward one. Torch's own figures are of full attention, and have the scores that a fused kernel
    computes again.
    """

    def all_documents(factor: int) -> Any:
        def formula(*shapes: Any, **_: Any) -> int:
            _total, heads, width = next(shape for shape in shapes if shape is not None)
            return int(factor * heads * width * sum_len_sq)

        return formula

    def in_place(_total: Any, left: Any, right: Any, **_: Any) -> int:
        return int(2 * left[0] * left[1] * right[1])

    return {
        ATEN.addmm_: in_place,
        OWN._varlen_attn: all_documents(2),
        OWN._varlen_attn_backward: all_documents(4),
    }


def run_of(lora: LoraSpec | None, config: PretrainedConfig = CONFIG) -> TracedRun:
    return TracedRun(
        config=config, method="full" if lora is None else "lora", lora=lora, attention="packed",
        dtype=torch.bfloat16, kernel=True, supervised_fraction=SUPERVISED,
    )  # fmt: skip


def counted(run: TracedRun, n_rows: int, *, checkpoint: bool) -> float:
    """Count a step without data, forward and backward, by the variable-length kernel."""
    batch = sample_batch(DOCUMENTS, n_rows, SUPERVISED)
    net: Any = build_model(run, n_layers=FACTS.n_layers, checkpoint=checkpoint)
    if run.lora is not None:
        # Without it, the lowest layer spares its input gradients: 1 layer of 3 here, of 28 there.
        net.enable_input_require_grads()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas(n_rows * SUM_LEN_SQ))
    with as_on_card(run), torch.autocast("cpu", dtype=run.dtype):
        materialize_weights(net)
        with counter:
            PackedLoss(net)(batch).backward()
    return counter.get_total_flops() / batch.n_tokens


def formula(lora: LoraSpec | None, *, checkpoint: bool, facts: ModelFacts = FACTS) -> FlopsPerToken:
    return flops_per_token(
        facts,
        lora=lora,
        mean_context_tokens=SUM_LEN_SQ / (2 * sum(DOCUMENTS)),
        supervised_fraction=SUPERVISED,
        checkpoint_activations=checkpoint,
    )


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_flops_agree_with_torchs_counter(kind: str, checkpoint: bool) -> None:
    """Several documents a row, the head on supervised rows; recomputation is hardware's."""
    run = run_of(KINDS[kind])
    # The norms of DoRA's weights are taken once a micro-batch: few tokens would show them.
    seen = counted(run, 16, checkpoint=checkpoint)
    assert formula(run.lora, checkpoint=checkpoint).hardware == pytest.approx(seen, rel=0.01)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("model_type", WITHOUT_GATES)
def test_mlps_without_gate(model_type: str, full: bool) -> None:
    config, n_kv_heads, targets = WITHOUT_GATES[model_type]
    run = run_of(None if full else replace(LORA, targets=targets), config)
    n_matrices = mlp_matrices(model_type)
    facts = replace(FACTS, model_type=model_type, n_kv_heads=n_kv_heads, n_mlp_matrices=n_matrices)
    seen = counted(run, 16, checkpoint=False)
    assert formula(run.lora, checkpoint=False, facts=facts).model == pytest.approx(seen, rel=0.01)
    assert flops_doubts(facts, run.lora) == ""
    if not full:
        net = build_model(run, n_layers=FACTS.n_layers, checkpoint=False)
        trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert adapter_weights(facts, run.lora) == trained


def test_an_unknown_model_says_what_its_flops_take_for_granted() -> None:
    unknown = replace(FACTS, model_type="of-tomorrow")
    doubts = flops_doubts(unknown, replace(LORA, targets=("q_proj", "mixer")))
    assert "gated MLP; model type of-tomorrow is not known" in doubts
    assert "adapters of mixer are not in it" in doubts
    assert flops_doubts(FACTS, LORA) == flops_doubts(FACTS, None) == ""
