"""Bytes of a step without data: equal to a real one's, and exact in layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import LORA, plan_spec
from transformers import PretrainedConfig, Qwen3Config

from expertflow.hardware.records import GpuFacts
from expertflow.plan.memory import step_bytes_at
from expertflow.plan.records import MemoryTrace
from expertflow.train import memory_trace
from expertflow.train.memory_trace import TracedRun, build_model, materialize_weights

pytestmark = pytest.mark.long

SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = Qwen3Config(**SHAPE, head_dim=32)
AMPERE = GpuFacts(
    name="card", memory_total_bytes=8 * 10**9, compute_capability="8.0",
    peak_bf16_flops_per_s=1e14, peak_fp16_flops_per_s=1e14, source="a test",
)  # fmt: skip
ADAPTERS = {
    "lora": LORA,
    "dora": replace(LORA, use_dora=True),
    "whole": replace(LORA, modules_to_save=("embed_tokens",)),
}


def run_of(method: str = "lora", **changes: Any) -> TracedRun:
    settings = {
        "config": QWEN3, "method": method, "lora": None if method == "full" else LORA,
        "attention": "packed", "dtype": torch.bfloat16, "kernel": True, "supervised_fraction": 0.3,
    }  # fmt: skip
    return TracedRun(**{**settings, **changes})


def traced(
    tmp_path: Path, config: PretrainedConfig | None = QWEN3, **changes: object
) -> MemoryTrace:
    if config is not None:
        config.save_pretrained(tmp_path)
    spec = plan_spec(**{"method": "lora", "lora": LORA, "batch_size": None, **changes})
    return memory_trace.trace_memory(
        tmp_path, spec, gpu=AMPERE, attention="packed", sequence_length_tokens=64,
        supervised_fraction=0.3,
    )  # fmt: skip


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("method", ["full", *ADAPTERS])
def test_a_step_without_data_has_the_bytes_of_a_real_one(method: str, checkpoint: bool) -> None:
    """With eager attention, as the CPU has no variable-length kernel."""
    how = {"attention": "eager", "dtype": torch.float32}
    lora = ADAPTERS.get(method)
    run = run_of("full", **how) if lora is None else run_of("lora", lora=lora, **how)
    real = build_model(run, n_layers=2, checkpoint=checkpoint)
    materialize_weights(real)
    seen = memory_trace.follow_step(real, run, 2, 48)
    assert seen == memory_trace.trace_step(run, 2, 2, 48, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_layers_are_extended_exactly(method: str, checkpoint: bool) -> None:
    run = run_of(method)
    model, gradients, phases = memory_trace.trace_step(run, 5, 2, 128, checkpoint=checkpoint)
    extended = memory_trace.whole_model(run, 2, 128, checkpoint=checkpoint)
    assert extended == (model, gradients, max(phases.values()))


def test_weights_are_counted_as_stored(tmp_path: Path) -> None:
    lora = traced(tmp_path, batch_size=1).lines[0]
    n_adapter = 5 * 4 * (64 + 128 + 64 + 64)
    n_base = sum(
        p.numel() for p in build_model(run_of("full"), n_layers=5, checkpoint=False).parameters()
    )
    assert lora.gradient_bytes == 4 * n_adapter
    # Half precision, and 32 fp32 frequencies twice for the rotation.
    assert 2 * n_base + 4 * n_adapter <= lora.model_bytes <= 2 * n_base + 4 * n_adapter + 256
    full = traced(tmp_path, method="full", lora=None, batch_size=1).lines[0]
    assert full.gradient_bytes == 4 * n_base
    qlora = traced(tmp_path, method="qlora", batch_size=1).lines[0]
    assert qlora.model_bytes < lora.model_bytes


def test_lines_hold_for_two_loss_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vocabulary that is large compared with the layers, like real ones."""
    monkeypatch.setattr(memory_trace, "loss_chunk_rows", lambda *_, **__: 256)
    config = Qwen3Config(**{**SHAPE, "vocab_size": 4096}, head_dim=32)
    line = traced(tmp_path, config).lines[1]
    for n_rows in (8, 14):
        seen = memory_trace.whole_model(run_of(config=config), n_rows, 64, checkpoint=True)[2]
        assert seen <= step_bytes_at(line, n_rows * 64) <= 1.01 * seen, n_rows


def test_an_older_card_keeps_ungrouped_heads() -> None:
    by_kernel, by_document = (
        memory_trace.whole_model(run_of(kernel=on), 2, 128, checkpoint=False)[2]
        for on in (True, False)
    )
    assert by_document > by_kernel


def test_an_untraceable_step_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-tomorrow"}))
    made = traced(tmp_path, None)
    assert made.lines == () and "of-tomorrow" in (made.unavailable_reason or "")
    assert "fp32" in (traced(tmp_path, bf16=False).unavailable_reason or "")
    unknown = replace(LORA, targets=("of_tomorrow",))
    assert "of_tomorrow" in (traced(tmp_path, lora=unknown).unavailable_reason or "")
    assert "4-bit" in (
        traced(tmp_path, method="qlora", lora=ADAPTERS["dora"]).unavailable_reason or ""
    )
