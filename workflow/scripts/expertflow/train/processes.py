"""One process or several that train together: their start, what they share, what they agree on."""

import inspect
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch.nn.parallel import DistributedDataParallel

from expertflow.core.errors import TrainingError
from expertflow.core.process import end_with_parent
from expertflow.plan.records import TrainPlan
from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers
from expertflow.train.nodes import launcher

# What a launcher sets for each of its processes.
RANK = "RANK"
# A process may wait so long for another that loads a model, or writes a checkpoint of it.
PATIENCE = timedelta(minutes=30)
# A step and a checkpoint may be under way when all are told to stop.
SHUTDOWN_S = 300
# In many short naps: a machine that stands still for a while does so in one of them.
LET_GO_S, N_NAPS = 0.3, 15


class Processes:
    """The processes that train together, seen from one of them; there may be no other."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        # Flags are agreed on through the host: asking the device would make it wait every step.
        self._flags = dist.new_group(backend="gloo") if self.world_size > 1 else None

    @property
    def device(self) -> torch.device:
        """Give the device of this process."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def is_first(self) -> bool:
        """Tell whether this process writes what there is to write."""
        return self.rank == 0

    def scaled(self, optimizer: torch.optim.Optimizer) -> Any:
        """Let the loss scaler, where there is one, stand between the loop and the optimiser.

        Without one the wrapper does nothing, for a third of what the loop costs beside the model.
        """
        accelerator = self.accelerator
        return accelerator.prepare_optimizer(optimizer) if accelerator.scaler else optimizer

    def any_of(self, *flags: bool) -> list[bool]:
        """Give each flag as true where it is true in any process; all processes get the same."""
        if self._flags is None:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._flags)
        return [bool(vote) for vote in votes]

    def of_all(self, *numbers: int) -> list[list[int]]:
        """Give the numbers of all processes, those of the first one first. A collective."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        if self._flags is None:
            return [mine.tolist()]
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine, group=self._flags)
        return [theirs.tolist() for theirs in found]

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def end_trackers(self) -> None:
        """End what the run is reported to; may wait for a network, so it is done on the clock."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers = []

    def part(self) -> None:
        """Part from the other processes; the last thing that is done together."""
        if self.world_size > 1:
            self.accelerator.wait_for_everyone()
            let_go()
        self.accelerator.end_training()


def let_go() -> None:
    """Give gloo's threads the time to let go of finished work, before their group is destroyed.

    They do it under a lock, and need Python's lock for it; whoever destroys the group holds the one
    and waits for the other.
    """
    for _ in range(N_NAPS):
        time.sleep(LET_GO_S / N_NAPS)


def start(plan: TrainPlan, *, tracker_directory: str | None = None) -> Processes:
    """Join the processes of the run; the one with a directory for them has its trackers.

    Raises:
        TrainingError: there are more or fewer of them than the plan says.
    """
    tracked = plan.report_to != "none" and tracker_directory is not None
    accelerator = Accelerator(
        cpu=plan.gpu is None,
        mixed_precision="no" if plan.precision == "fp32" else plan.precision,
        log_with=plan.report_to if tracked else None,
        project_dir=tracker_directory,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if accelerator.num_processes != plan.world_size:
        raise TrainingError(
            f"the plan is for {plan.world_size} processes and {accelerator.num_processes} started;"
            f" use torchrun --nproc-per-node {plan.world_size}, or set training.world_size"
        )
    return Processes(accelerator)


def seed_all(plan: TrainPlan, processes: Processes) -> None:
    """Seed weights alike in all processes; dropout differs from one to the next."""
    set_seed(plan.seed)
    torch.manual_seed(plan.seed + processes.rank)


def is_helper() -> bool:
    """Tell whether this process was launched beside a first one."""
    return os.environ.get(RANK, "0") != "0"


def relaunch(world_size: int) -> None:
    """Replace this process by a launcher of ``world_size`` like it, unless it is one of them."""
    if world_size == 1 or RANK in os.environ:
        return
    # By the environment, as the flag is not known to every torch that is supported.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # By itself the launcher listens to it even under nohup.
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    command = launcher(world_size, sys.argv)
    os.execvp(command[0], command)


def stop_with_launcher() -> None:
    """Ask the kernel for a SIGTERM when the launcher ends, if there is one; on Linux only.

    The launcher gives each process a session of its own, so a signal to its group does not reach
    them: if it is killed, they are told to stop, and save.
    """
    if RANK in os.environ:
        end_with_parent()


def wrap(loss: PackedLoss, plan: TrainPlan) -> torch.nn.Module:
    """Make several processes add up their gradients: as copies of the model, or as shares of it."""
    if plan.world_size == 1:
        return loss
    if plan.parallel == "ddp":
        return DistributedDataParallel(loss, gradient_as_bucket_view=True, **_without_buffers())
    from torch.distributed.fsdp import fully_shard

    for module in (*decoder_layers(causal_lm(loss.model)), loss):
        fully_shard(module)
    return loss


def _without_buffers() -> dict[str, Any]:
    """Leave buffers alone, as they are the same everywhere, by the name this torch has for it."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def settle(loss: Any) -> None:
    """Leave shares where an evaluation left whole parameters.

    A forward pass without a backward one keeps those of the root gathered, and a state that is
    saved then would miss what the optimiser knows of them.
    """
    if hasattr(loss, "reshard"):
        loss.reshard()


@contextmanager
def adding_up(loss: Any, *, now: bool) -> Iterator[None]:
    """Let gradients be added up over processes in this backward pass, or leave it to a later."""
    if isinstance(loss, DistributedDataParallel):
        with nullcontext() if now else loss.no_sync():
            yield
        return
    if hasattr(loss, "set_requires_gradient_sync"):
        loss.set_requires_gradient_sync(now)
    yield
