import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import SCRIPTS
from tiny_net import content, snapshot, tiny_net, train_plan, trained

from expertflow.core.errors import TrainingError
from expertflow.train.model.weights import (
    first_not_finite,
    load_trainable_state,
    trainable_state,
    weights_sha256,
)
from expertflow.train.optimizer import make_optimizer
from expertflow.train.saved import checkpoint, checkpoint_files


def test_only_what_is_trained_is_kept() -> None:
    names = set(trainable_state(tiny_net("lora")))
    assert names and all("lora_" in name for name in names)
    assert "head.weight" not in trainable_state(tiny_net()), "tied to the embedding"


def test_a_state_goes_back_bit_by_bit() -> None:
    source, target = tiny_net(seed=0), tiny_net(seed=1)
    assert weights_sha256(source) != weights_sha256(target)
    load_trainable_state(target, trainable_state(source))
    assert weights_sha256(source) == weights_sha256(target)


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


def test_what_two_processes_saved_one_resumes_and_the_other_way_round(tmp_path: Path) -> None:
    plan = train_plan()
    net, optimizer = trained(plan)
    one = checkpoint.write(tmp_path / "one", snapshot(net, optimizer, step=3), keep=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command += [str(Path(__file__).with_name("sharded_run.py")), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["n_sharded"] == len(trainable_state(net))

    again = checkpoint_files.newest(tmp_path / "one_by_two")
    assert again is not None
    assert content(again) == content(one)

    two = checkpoint_files.newest(tmp_path / "two")
    assert two is not None
    assert content(two) != content(one), "two processes went on training"
    other = tiny_net(seed=5)
    new = make_optimizer(other, plan)
    checkpoint.restore(two, model=other, optimizer=new, scaler=None, rank=0, world_size=1)
    assert weights_sha256(other) == report["weights_sha256"]
    by_one = checkpoint.write(tmp_path / "two_by_one", snapshot(other, new, step=5), keep=1)
    assert content(by_one) == content(two)
