"""Two processes that share a net's parameters: resume, save, train, save, resume.

Started by ``test_weights.py``, with the folder to work in.
"""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_net import snapshot, steps, tiny_net, train_plan
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from expertflow.core.errors import TrainingError
from expertflow.train.model.weights import first_not_finite, weights_sha256
from expertflow.train.optimizers import make_optimizer
from expertflow.train.processes import release_gloo_threads
from expertflow.train.saved import checkpoint, checkpoint_files


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plan = train_plan()
    net = tiny_net(seed=7)
    fully_shard(net.up)
    fully_shard(net)
    optimizer = make_optimizer(net, plan)
    how = {"model": net, "optimizer": optimizer, "scaler": None, "rank": rank, "world_size": 2}

    one = checkpoint_files.newest_checkpoint(folder / "one")
    assert one is not None
    checkpoint.restore_checkpoint(one, **how)
    taken = snapshot(net, optimizer, step=3)
    assert (taken is not None) == (rank == 0)
    if taken is not None:
        checkpoint.write_checkpoint(folder / "one_by_two", taken, keep=1)

    torch.manual_seed(rank)
    steps(net, optimizer, plan, of=range(3, 5))
    taken = snapshot(net, optimizer, step=5)
    if taken is not None:
        checkpoint.write_checkpoint(folder / "two", taken, keep=1)
    dist.barrier()
    draw, sha256 = torch.rand(4), weights_sha256(net)
    steps(net, optimizer, plan, of=range(5, 7))
    goal = weights_sha256(net)
    two = checkpoint_files.newest_checkpoint(folder / "two")
    assert two is not None
    checkpoint.restore_checkpoint(two, **how)
    assert weights_sha256(net) == sha256
    assert torch.equal(torch.rand(4), draw), "each rank has its own random numbers back"
    steps(net, optimizer, plan, of=range(5, 7))
    assert weights_sha256(net) == goal

    if rank == 0:
        sharded = [p for p in net.parameters() if isinstance(p, DTensor)]
        report = {"weights_sha256": sha256, "n_sharded": len(sharded)}
        (folder / "report.json").write_text(json.dumps(report))
    with torch.no_grad():
        if rank == 1:
            net.norm.weight.to_local()[-1] = math.nan
    assert first_not_finite(net) == "norm.weight", "a NaN in one share is seen by all"
    with pytest.raises(TrainingError, match=r"norm\.weight is not finite"):
        snapshot(net, optimizer, step=7)
    dist.barrier()
    release_gloo_threads()
    dist.destroy_process_group()
    # A thread of gloo that still needs Python's lock would abort an interpreter that winds down.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
