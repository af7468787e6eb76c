"""FLOPs against torch's own counter, through the training's loss and attention."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import LORA
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    PretrainedConfig,
    Qwen3Config,
    Starcoder2Config,
)
from transformers.pytorch_utils import Conv1D

from expertflow.plan import flops
from expertflow.plan.records import ModelFacts
from expertflow.plan.settings import LoraSpec, Whole
from expertflow.train import memory_trace
from expertflow.train.model.packed import PackedLoss

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "intermediate_size": 512, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
# Only the first has a gate.
FAMILIES: dict[str, tuple[PretrainedConfig, tuple[str, ...]]] = {
    "qwen3": (
        Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=32),
        (*ATTENTION, "up_proj", "down_proj"),
    ),
    "starcoder2": (
        Starcoder2Config(**SHAPE, num_key_value_heads=4),
        (*ATTENTION, "c_fc", "c_proj"),
    ),
    "gpt_neox": (GPTNeoXConfig(**SHAPE), NEOX),
    "gpt2": (
        GPT2Config(**SHAPE, attn_pdrop=0.0, n_inner=512),
        ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    ),
}
DOCUMENTS = (700, 48, 200, 76)
SUM_LEN_SQ = sum(n * n for n in DOCUMENTS)
SUPERVISED = 0.25
# The norms of DoRA's weights are computed once per micro-batch: few tokens would show them.
N_ROWS = 16
ATEN, OWN = torch.ops.aten, torch.ops.torch_attn


def facts_of(model_type: str) -> ModelFacts:
    n_kv_heads = getattr(FAMILIES[model_type][0], "num_key_value_heads", 8)
    return ModelFacts(
        n_layers=3, hidden_size=256, n_heads=8, n_kv_heads=n_kv_heads, head_dim=32,
        intermediate_size=512, vocab_size=4096, tie_word_embeddings=True, model_type=model_type,
    )  # fmt: skip


def lora_of(model_type: str, kind: str) -> LoraSpec | None:
    """Return the adapter of full, lora, lora with a trained head, dora ..."""
    if kind == "full":
        return None
    dropout, targets = 0.1 if "dropout" in kind else 0.0, FAMILIES[model_type][1]
    whole: tuple[Whole, ...] = ("lm_head",) if "whole" in kind else ()
    dora = "dora" in kind
    return replace(LORA, dropout=dropout, targets=targets, use_dora=dora, modules_to_save=whole)


def _formulas() -> dict[Any, Any]:
    """Return the FLOPs of attention by kernel, and of an in-place product, which torch leaves out.

    Attention counts by convention: causal, within documents (whose lengths tensors without data
    do not have), and twice the forward pass for the backward one. Torch's own figures are of
    full attention, and include the scores that a fused kernel recomputes.
    """

    def all_documents(factor: int) -> Any:
        def formula(*shapes: Any, **_: Any) -> int:
            _total, heads, width = next(shape for shape in shapes if shape is not None)
            return int(factor * heads * width * N_ROWS * SUM_LEN_SQ)

        return formula

    def in_place(_total: Any, left: Any, right: Any, **_: Any) -> int:
        return int(2 * left[0] * left[1] * right[1])

    return {
        ATEN.addmm_: in_place,
        OWN._varlen_attn: all_documents(2),
        OWN._varlen_attn_backward: all_documents(4),
    }


def run_of(model_type: str, kind: str) -> memory_trace.TracedRun:
    config, lora = FAMILIES[model_type][0], lora_of(model_type, kind)
    return memory_trace.TracedRun(
        config=config, method="full" if lora is None else "lora", lora=lora, attention="packed",
        dtype=torch.bfloat16, kernel=True, supervised_fraction=SUPERVISED,
    )  # fmt: skip


def counted(run: memory_trace.TracedRun, *, checkpoint: bool) -> float:
    """Count a step without data, forward and backward, with the variable-length kernel."""
    batch = memory_trace.sample_batch(DOCUMENTS, N_ROWS, SUPERVISED)
    net: Any = memory_trace.build_model(run, n_layers=3, checkpoint=checkpoint)
    if run.lora is not None:
        # Without it, the lowest layer skips its input gradients: 1 layer of 3 here, of 28 there.
        net.enable_input_require_grads()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with memory_trace.as_on_card(run), torch.autocast("cpu", dtype=run.dtype):
        memory_trace.materialize_weights(net)
        with counter:
            PackedLoss(net)(batch).backward()
    return counter.get_total_flops() / batch.n_tokens


KINDS = ("full", "lora", "dora", "dora with dropout", "lora and a whole head")
CASES = [("qwen3", kind, False) for kind in KINDS]
CASES += [("qwen3", kind, True) for kind in (*KINDS[:2], "dora with dropout")]
CASES += [(name, "lora", False) for name in ("starcoder2", "gpt_neox", "gpt2")]


@pytest.mark.parametrize(("model_type", "kind", "checkpoint"), CASES)
def test_flops_agree_with_torchs_counter(model_type: str, kind: str, checkpoint: bool) -> None:
    """Several documents per row, the head on supervised rows; recomputation is hardware FLOPs."""
    run, facts = run_of(model_type, kind), facts_of(model_type)
    found = flops.flops_per_token(
        facts, lora=run.lora, mean_context_tokens=SUM_LEN_SQ / (2 * sum(DOCUMENTS)),
        supervised_fraction=SUPERVISED, checkpoint_activations=checkpoint,
    )  # fmt: skip
    assert found.hardware == pytest.approx(counted(run, checkpoint=checkpoint), rel=0.01)
    assert checkpoint == (found.model < found.hardware)
    assert flops.flops_doubts(facts, run.lora) == ""
    if run.lora is not None and not run.lora.use_dora:
        net = memory_trace.build_model(run, n_layers=3, checkpoint=False)
        trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert flops.count_trained_weights(facts, run.lora) == trained


@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_and_shapes_are_those_of_the_layers(model_type: str) -> None:
    net = memory_trace.build_model(run_of(model_type, "full"), n_layers=3, checkpoint=False)
    head = net.get_output_embeddings()
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    facts = facts_of(model_type)
    assert flops.linear_weights(facts) == sum(layer.weight.numel() for layer in layers)
    assert len(flops.layer_shapes(facts)) == len(layers) / facts.n_layers


def test_an_unknown_model_states_the_assumptions_of_its_flops() -> None:
    unknown = replace(facts_of("qwen3"), model_type="of-tomorrow")
    lora = lora_of("qwen3", "lora")
    assert lora is not None
    doubts = flops.flops_doubts(unknown, replace(lora, targets=("q_proj", "mixer")))
    assert "gated MLP; model type of-tomorrow is unknown" in doubts
    assert "adapters of mixer are not counted" in doubts
