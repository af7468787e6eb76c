import hashlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT
from tiny_net import content, snapshot, tiny_net, train_plan, trained
from trainers import Trainers

from expertflow.core.errors import TrainingError
from expertflow.train.model.weights import (
    first_not_finite,
    load_trainable_state,
    trainable_state,
    weights_sha256,
)
from expertflow.train.optimizers import BITSANDBYTES, OPTIMIZERS, learning_rate, make_optimizer
from expertflow.train.saved import checkpoint, checkpoint_files

EIGHT_BIT = pytest.param("adamw_8bit", marks=pytest.mark.extra("bitsandbytes"))


def test_another_shape_or_name_is_refused_before_anything_is_copied() -> None:
    net = tiny_net()
    before = weights_sha256(net)
    state = {name: tensor + 1 for name, tensor in trainable_state(net).items()}
    wide = state | {"norm.bias": torch.zeros(1)}
    with pytest.raises(TrainingError, match=r"norm\.bias is float32 \[1\] in the saved state"):
        load_trainable_state(net, wide)
    del state["up.bias"]
    with pytest.raises(TrainingError, match=r"up\.bias is missing in the saved state"):
        load_trainable_state(net, state)
    assert weights_sha256(net) == before


def test_the_hash_is_of_names_and_bits() -> None:
    net = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    digest = hashlib.sha256()
    for name in ("bias", "weight"):
        digest.update(name.encode())
        digest.update(getattr(net, name).detach().view(torch.int16).numpy().tobytes())
    assert weights_sha256(net) == digest.hexdigest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_named(value: float, dtype: torch.dtype) -> None:
    net = tiny_net(dtype=dtype)
    with torch.no_grad():
        net.up.weight.fill_(torch.finfo(dtype).max)
        assert first_not_finite(net) is None, "large is not infinite"
        net.up.weight[5, 3] = value
        net.norm.bias[0] = value
    assert first_not_finite(net) == "up.weight"
    net.up.weight.requires_grad_(False)
    assert first_not_finite(net) == "norm.bias"


@pytest.mark.long
def test_what_two_processes_saved_one_resumes_and_the_other_way_round(
    trainers: Trainers, tmp_path: Path
) -> None:
    plan = train_plan()
    net, optimizer = trained(plan)
    one = checkpoint.write_checkpoint(tmp_path / "one", snapshot(net, optimizer, step=3), keep=1)
    script = str(Path(__file__).with_name("sharded_run.py"))
    answer = trainers.train(tmp_path, script=script, n_processes=2)
    assert answer["code"] == 0, (tmp_path / "log").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["n_sharded"] == len(trainable_state(net))

    again = checkpoint_files.newest_checkpoint(tmp_path / "one_by_two")
    assert again is not None
    assert content(again) == content(one)

    two = checkpoint_files.newest_checkpoint(tmp_path / "two")
    assert two is not None
    assert content(two) != content(one), "two processes went on training"
    other = tiny_net(seed=5)
    new = make_optimizer(other, plan)
    checkpoint.restore_checkpoint(
        two, model=other, optimizer=new, scaler=None, rank=0, world_size=1
    )
    assert weights_sha256(other) == report["weights_sha256"]
    by_one = checkpoint.write_checkpoint(
        tmp_path / "two_by_one", snapshot(other, new, step=5), keep=1
    )
    assert content(by_one) == content(two)


def names_by_decay(net: torch.nn.Module) -> dict[float, set[str]]:
    optimizer = make_optimizer(net, train_plan(weight_decay=0.3))
    found = {}
    for group in optimizer.param_groups:
        own = {id(p) for p in group["params"]}
        found[group["weight_decay"]] = {n for n, p in net.named_parameters() if id(p) in own}
    return found


def test_vectors_get_no_weight_decay() -> None:
    found = names_by_decay(tiny_net())
    assert found == {
        0.3: {"embed.weight", "up.weight"},
        0.0: {"up.bias", "norm.weight", "norm.bias"},
    }


def test_the_magnitudes_of_dora_get_no_weight_decay() -> None:
    net = tiny_net("dora")
    found = names_by_decay(net)
    assert {name.split(".")[-3] for name in found[0.0]} == {"lora_magnitude_vector"}
    assert {name.split(".")[-3] for name in found[0.3]} == {"lora_A", "lora_B"}
    # On an embedding the magnitudes would be a matrix; the name decides.
    holder = torch.nn.Module()
    holder.lora_magnitude_vector = torch.nn.Linear(3, 3, bias=False)
    assert names_by_decay(holder) == {0.0: {"lora_magnitude_vector.weight"}}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", EIGHT_BIT])
def test_the_settings_reach_the_optimizer(optim: str) -> None:
    plan = train_plan(optim=optim, adam_epsilon=1e-5, adam_beta1=0.8, adam_beta2=0.95)
    optimizer = make_optimizer(tiny_net(), plan)
    for group in optimizer.param_groups:
        assert (group["eps"], tuple(group["betas"])) == (1e-5, (0.8, 0.95))
    assert optimizer.param_groups[0].get("fused", False) == (optim == "adamw_torch_fused")


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_an_optimizer_keeps_as_many_bytes_as_a_plan_counts(optim: str) -> None:
    net, optimizer = trained(train_plan(optim=optim))
    moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    n_parameters = sum(p.numel() for p in net.parameters())
    assert sum(t.nbytes for t in moments) == OPTIMIZERS[optim].state_bytes * n_parameters


def test_8_bit_adamw_keeps_two_bytes_on_one_process_by_a_package_with_a_lock() -> None:
    own = OPTIMIZERS["adamw_8bit"]
    assert (own.state_bytes, own.package, own.is_shardable) == (2, "bitsandbytes", False)
    assert (ROOT / BITSANDBYTES).is_file()


def test_8_bit_adamw_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        TrainingError, match=r"pip install -r envs/requirements-bitsandbytes\.lock"
    ) as caught:
        make_optimizer(tiny_net(), train_plan(optim="adamw_8bit"))
    assert "\n" not in str(caught.value)


def closed_form(kind: str, step: int) -> float:
    """Peak 1, 10 steps, of them 2 to warm up and 3 to decay at the end."""
    if step < 2:
        return (step + 1) / 2
    x = (step - 2) / 8
    return {
        "cosine": math.cos(math.pi * x / 2) ** 2,
        "linear": 1 - x,
        "constant_with_warmup": 1.0,
        "warmup_stable_decay": min(1.0, (10 - step) / 3),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["cosine", "linear", "constant_with_warmup", "warmup_stable_decay"]
)
def test_schedules(kind: str) -> None:
    plan = train_plan(lr_scheduler_type=kind, learning_rate=1.0)
    for step in range(10):
        assert learning_rate(step, plan) == pytest.approx(closed_form(kind, step), abs=1e-12)


def test_no_decay_steps_means_no_decay() -> None:
    plan = train_plan(lr_scheduler_type="warmup_stable_decay", n_decay_steps=0, n_warmup_steps=0)
    assert {learning_rate(step, plan) for step in range(10)} == {plan.learning_rate}
