"""Training on a base in 4 bits: what learns, what stays, and that it is the same every time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support import LORA

from expertflow.core.errors import TrainingError
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Collator
from expertflow.train.model import load as loading
from expertflow.train.model.load import describe_weights, load_for_scoring, load_for_training
from expertflow.train.model.packed import PackedLoss, causal_lm, compute_held_out_loss
from expertflow.train.model.weights import load_trainable_state, trainable_state
from expertflow.train.run import TrainInputs

needs_bitsandbytes = pytest.mark.extra("bitsandbytes")
Load = Callable[..., Any]


@pytest.fixture
def run(tiny: TrainInputs) -> TrainInputs:
    # Every kind of layer of Qwen3 that is quantized; the LoRA of the demos has two.
    lora = replace(LORA, targets=("q_proj", "o_proj", "down_proj"))
    return replace(tiny, plan=replace(tiny.plan, method="qlora", lora=lora))


@pytest.fixture
def load(run: TrainInputs) -> Load:
    def load_(**changes: Any) -> Any:
        torch.manual_seed(1)
        assert run.plan.lora is not None
        plan = replace(run.plan, lora=replace(run.plan.lora, **changes))
        return load_for_training(plan, run.model, torch.device("cpu"))

    return load_


@pytest.fixture
def rows() -> PackedRows:
    ids = np.random.default_rng(0).integers(0, 97, (2, 32)).astype(np.int32)
    return PackedRows.from_lists(ids, [[20, 12], [32]], [[2, 20, 22, 32], [2, 32]])


def held_out_loss(net: Any, rows: PackedRows) -> Any:
    return compute_held_out_loss(PackedLoss(net), rows, micro_batch_size=2)


def train(net: Any, rows: PackedRows, *, n_steps: int) -> list[float]:
    loss, losses = PackedLoss(net), []
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batch = Collator(rows).batch(np.arange(2))
    loss.train()
    for _ in range(n_steps):
        value = loss(batch) / batch.n_target_tokens
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@needs_bitsandbytes
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_the_adapter_learns_and_nothing_else(
    load: Load, rows: PackedRows, changes: dict[str, bool]
) -> None:
    net = load(**changes)
    frozen = {n: p.clone() for n, p in net.named_parameters() if not p.requires_grad}
    losses = train(net, rows, n_steps=25)
    assert losses[-1] < losses[0] - 0.2
    after = dict(net.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    learnt = {name: p for name, p in after.items() if p.requires_grad}
    assert learnt and all("lora_" in name for name in learnt)
    assert {p.dtype for p in learnt.values()} == {torch.float32}


@needs_bitsandbytes
def test_layers_are_in_4_bits_and_embeddings_and_head_are_not(load: Load, run: TrainInputs) -> None:
    net = load()
    lm = causal_lm(net)
    assert len(loading.list_quantized_layers(lm)) == 2 * 7
    state = lm.model.layers[0].self_attn.k_proj.weight.quant_state
    assert (state.quant_type, state.nested) == ("nf4", True)
    assert type(lm.get_output_embeddings()) is torch.nn.Linear
    assert lm.get_output_embeddings().weight.dtype == torch.float32
    assert describe_weights(net, run.plan).startswith(
        "base in NF4, double quantized, fp32 compute: 14 layers;"
    )


@needs_bitsandbytes
def test_an_adapter_comes_back_from_plain_safetensors(
    load: Load, rows: PackedRows, run: TrainInputs, tmp_path: Path
) -> None:
    net = load()
    train(net, rows, n_steps=5)
    expected = held_out_loss(net, rows)
    save_file(trainable_state(net), tmp_path / "weights.safetensors")
    fresh = load()
    load_trainable_state(fresh, load_file(tmp_path / "weights.safetensors"))
    assert held_out_loss(fresh, rows) == expected
    net.save_pretrained(tmp_path / "checkpoint")
    scored = load_for_scoring(tmp_path / "checkpoint", model=run.model, plan=run.plan)
    assert held_out_loss(scored, rows) == expected


@needs_bitsandbytes
def test_before_training_the_base_is_scored_in_4_bits_too(
    load: Load, rows: PackedRows, run: TrainInputs
) -> None:
    untrained = held_out_loss(load(), rows)
    for method in ("qlora", "lora"):
        plan = replace(run.plan, method=method)
        before = load_for_scoring(None, model=run.model, plan=plan)
        assert (held_out_loss(before, rows) == untrained) is (method == "qlora")


def test_a_missing_package_is_one_line_with_the_fix(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=r"run pip install -r envs/requirements-bitsandbytes"):
        load()
