"""Hashing, checking and sharding weights; optimizers and schedules by name."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from tiny_net import snapshot, steps, tiny_net, train_plan, trained
from torch.distributed.fsdp import fully_shard
from trainers import Trainers

from expertflow.core.errors import TrainingError
from expertflow.train.model import weights
from expertflow.train.optimizers import (
    BITSANDBYTES,
    OPTIMIZERS,
    learning_rate,
    make_optimizer,
    state_bytes,
)
from expertflow.train.processes import release_gloo_threads

EIGHT_BIT = pytest.param("adamw_8bit", marks=pytest.mark.extra("bitsandbytes"))


def test_another_shape_or_name_is_rejected_before_anything_is_copied() -> None:
    net = tiny_net()
    before = weights.weights_sha256(net)
    state = {name: tensor + 1 for name, tensor in weights.trainable_state(net).items()}
    for other, words in (
        (torch.zeros(1), r"float32 \[1\]"), (state["norm.bias"].bfloat16(), r"bfloat16 \[64\]"),
    ):  # fmt: skip
        with pytest.raises(TrainingError, match=rf"norm\.bias is {words} in the saved state and f"):
            weights.load_trainable_state(net, state | {"norm.bias": other})
    del state["up.bias"]
    with pytest.raises(TrainingError, match=r"up\.bias is missing in the saved state"):
        weights.load_trainable_state(net, state)
    assert weights.weights_sha256(net) == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_weights_are_named(value: float, dtype: torch.dtype) -> None:
    net = tiny_net(dtype=dtype)
    with torch.no_grad():
        net.up.weight.fill_(torch.finfo(dtype).max)
        assert weights.first_not_finite(net) is None, "large is not infinite"
        net.up.weight[5, 3] = value
        net.norm.bias[0] = value
    assert weights.first_not_finite(net) == "up.weight"
    net.up.weight.requires_grad_(False)
    assert weights.first_not_finite(net) == "norm.bias"


def lose_a_share(folder: Path) -> None:
    """Shard a net between two processes; the second one's shard has the non-finite value."""
    dist.init_process_group("gloo")
    plan, net = train_plan(), tiny_net()
    fully_shard(net)
    optimizer = make_optimizer(net, plan)
    steps(net, optimizer, plan, of=range(1))
    assert weights.first_not_finite(net) is None
    with torch.no_grad():
        if dist.get_rank() == 1:
            net.norm.weight.to_local()[-1] = math.nan
    assert weights.first_not_finite(net) == "norm.weight"
    with pytest.raises(TrainingError, match=r"norm\.weight is not finite"):
        snapshot(net, optimizer, step=1)
    (folder / f"refused-{dist.get_rank()}").touch()
    dist.barrier()
    release_gloo_threads()
    dist.destroy_process_group()
    # A gloo thread that still needs Python's lock would abort an interpreter that is exiting.
    os._exit(0)


@pytest.mark.long
def test_a_nan_in_the_shard_of_one_of_two_processes_is_seen_by_both(
    trainers: Trainers, tmp_path: Path
) -> None:
    trainers.call(lose_a_share, tmp_path)
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0", "refused-1"}


def names_by_decay(net: torch.nn.Module) -> dict[float, set[str]]:
    optimizer = make_optimizer(net, train_plan(weight_decay=0.3))
    names = {id(p): name for name, p in net.named_parameters()}
    return {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}


def test_vectors_get_no_weight_decay_and_zero_decay_steps_no_schedule() -> None:
    assert names_by_decay(tiny_net()) == {
        0.3: {"embed.weight", "up.weight"},
        0.0: {"up.bias", "norm.weight", "norm.bias"},
    }
    found = names_by_decay(tiny_net("dora"))
    assert {name.split(".")[-3] for name in found[0.0]} == {"lora_magnitude_vector"}
    assert {name.split(".")[-3] for name in found[0.3]} == {"lora_A", "lora_B"}
    # On an embedding the magnitudes would be a matrix; the name decides.
    holder = torch.nn.Module()
    holder.lora_magnitude_vector = torch.nn.Linear(3, 3, bias=False)
    assert names_by_decay(holder) == {0.0: {"lora_magnitude_vector.weight"}}
    plan = train_plan(lr_scheduler_type="warmup_stable_decay", n_decay_steps=0, n_warmup_steps=0)
    assert {learning_rate(step, plan) for step in range(10)} == {plan.learning_rate}


@pytest.mark.parametrize("pure_bf16", [False, True])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", EIGHT_BIT])
def test_the_settings_reach_the_optimizer(optim: str, pure_bf16: bool) -> None:
    settings = {"adam_epsilon": 1e-5, "adam_beta1": 0.8, "adam_beta2": 0.95}
    plan = train_plan(optim=optim, learning_rate=0.0, pure_bf16=pure_bf16, **settings)
    net, optimizer = trained(plan, dtype=torch.bfloat16 if pure_bf16 else torch.float32)
    for group in optimizer.param_groups:
        assert (group["eps"], tuple(group["betas"])) == (1e-5, (0.8, 0.95))
    assert optimizer.param_groups[0].get("fused", False) == (optim == "adamw_torch_fused")
    assert OPTIMIZERS[optim].is_shardable == (optim != "adamw_8bit")
    if optim != "adamw_8bit":
        moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        n_parameters = sum(p.numel() for p in net.parameters())
        assert sum(t.nbytes for t in moments) == state_bytes(plan) * n_parameters


def test_8_bit_adamw_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OPTIMIZERS["adamw_8bit"]
    assert (own.package, own.is_shardable) == ("bitsandbytes", False)
    for pure_bf16 in (False, True):
        assert state_bytes(train_plan(optim="adamw_8bit", pure_bf16=pure_bf16)) == 2
    assert (ROOT / BITSANDBYTES).is_file()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(TrainingError, match=rf"pip install -r {BITSANDBYTES}"):
        make_optimizer(tiny_net(), train_plan(optim="adamw_8bit"))


def test_schedules() -> None:
    """Peak 1, 10 steps: 2 of warm-up and a decay over the last 3."""
    after_warm_up: dict[str, Callable[[float, int], float]] = {
        "cosine": lambda x, left: math.cos(math.pi * x / 2) ** 2,
        "linear": lambda x, left: 1 - x,
        "constant_with_warmup": lambda x, left: 1.0,
        "warmup_stable_decay": lambda x, left: min(1.0, left / 3),
    }
    for kind, rate in after_warm_up.items():
        plan = train_plan(lr_scheduler_type=kind, learning_rate=1.0)
        expected = [0.5, 1.0, *(rate((step - 2) / 8, 10 - step) for step in range(2, 10))]
        found = [learning_rate(step, plan) for step in range(10)]
        assert found == pytest.approx(expected, abs=1e-12)
