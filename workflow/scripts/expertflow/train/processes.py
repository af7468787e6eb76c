"""Start one or several training processes, and communicate between them."""

import contextlib
import inspect
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from expertflow.core.attempts import environment_of_attempt
from expertflow.core.errors import TrainingError, TransientError, single_line
from expertflow.core.records import to_json
from expertflow.plan.records import TrainPlan
from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers

# Set by a launcher for each of its processes.
RANK = "RANK"
# How long a process may wait for another that loads a model or writes its checkpoint: the weights
# and moments of an 8B model are about 110 GB, which take 37 minutes at 50 MB/s.
PATIENCE = timedelta(hours=1)
# Time for a running step and checkpoint to finish when all processes are stopped.
SHUTDOWN_S = 300
# In many short naps, so that a machine suspended for a while loses only one of them.
LET_GO_S, N_NAPS = 0.3, 15
# A prefix, since torch and its launcher keep their own keys in the same store.
GO_ON = "expertflow/go_on"
POLL_S = 0.5
TORCHRUN = ("-m", "torch.distributed.run")
SLURM_S = 60
PORTS = range(20_000, 32_000)


class Processes:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.is_first = self.rank == 0
        self.world_size: int = accelerator.num_processes
        # Flags are reduced on the host: asking the device would stall it every step.
        several = self.world_size > 1
        self._flags = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Wrap the optimizer for the loss scaler, if there is one.

        Without one the wrapper does nothing, yet takes a third of the loop's time outside the
        model.
        """
        accelerator = self.accelerator
        return accelerator.prepare_optimizer(optimizer) if accelerator.scaler else optimizer

    def any_of(self, *flags: bool) -> list[bool]:
        """Return each flag as true if it is true in any process. A collective."""
        return [any(votes) for votes in zip(*self.of_all(*flags), strict=True)]

    def of_all(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of all processes, ordered by rank. A collective."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        if self._flags is None:
            return [mine.tolist()]
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine, group=self._flags)
        return [theirs.tolist() for theirs in found]

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes. A collective."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def shutdown_process_group(self) -> None:
        """Must be the last collective."""
        if self.world_size > 1:
            self.accelerator.wait_for_everyone()
            release_gloo_threads()
        self.accelerator.end_training()


def release_gloo_threads() -> None:
    """Wait for gloo's threads to release finished work: destroying the group blocks them."""
    for _ in range(N_NAPS):
        time.sleep(LET_GO_S / N_NAPS)


class RankZeroDecision:
    """Rank 0's decision, broadcast through a store, since it may wait hours for a lock."""

    def __init__(self) -> None:
        several = RANK in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
        # Kept alive, because this process may serve it to the others.
        self._store = next(rendezvous("env://", timeout=PATIENCE))[0] if several else None

    def announce(self, *, go_on: bool) -> None:
        if self._store is not None:
            self._store.set(GO_ON, str(int(go_on)))

    def wait(self) -> bool:
        assert self._store is not None, "there is no rank 0 to wait for"
        try:
            while not self._store.check([GO_ON]):
                time.sleep(POLL_S)
            return bool(int(self._store.get(GO_ON)))
        except dist.DistError as error:
            raise TransientError(
                f"process {os.environ[RANK]}: the first process exited before training began;"
                " check its log, and run again"
            ) from error


def start_processes(plan: TrainPlan, *, tracker_directory: str | None = None) -> Processes:
    """Join the run's processes; the one with a tracker directory starts the trackers."""
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
            f"the plan is for {plan.world_size} processes, but {accelerator.num_processes} started;"
            f" use torchrun --nproc-per-node {plan.world_size}, or set training.world_size"
        )
    if tracked:
        settings = to_json(plan)
        plain = {k: v for k, v in settings.items() if isinstance(v, bool | int | float | str)}
        try:
            accelerator.init_trackers(f"expertflow-{plan.expert}", config=plain)
        except Exception as error:  # each tracker has its own error classes
            raise TrainingError(
                f"training.report_to {plan.report_to}: {single_line(error, 200)}; for wandb run"
                " `wandb login` or set WANDB_MODE=offline in the environment; or set it to none"
            ) from error
    return Processes(accelerator)


def wrap_model(loss: PackedLoss, plan: TrainPlan) -> torch.nn.Module:
    if plan.world_size == 1:
        return loss
    if plan.parallel == "ddp":
        # Buffers are the same everywhere; the name of this option differs between torch releases.
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {name: False}
        return DistributedDataParallel(loss, gradient_as_bucket_view=True, **options)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    # DoRA starts at magnitudes that equal its norms, and in bf16 would start elsewhere.
    if plan.precision == "bf16" and not (plan.lora and plan.lora.use_dora):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # The entire model comes last: it takes only what no layer has, i.e. embeddings, norm and head.
    for module in (*decoder_layers(causal_lm(loss.model)), loss):
        fully_shard(module, mp_policy=policy)
    return loss


def no_gradient_sync(loss: Any, *, when: bool) -> AbstractContextManager[None]:
    if hasattr(loss, "set_requires_gradient_sync"):
        loss.set_requires_gradient_sync(not when)
    is_ddp = isinstance(loss, DistributedDataParallel)
    return loss.no_sync() if is_ddp and when else nullcontext()


def launch_processes(world_size: int) -> None:
    if world_size == 1 or RANK in os.environ:
        return
    # In the environment, since not every supported torch has the flag.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # By default the launcher handles it even under nohup.
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    os.environ.update(environment_of_attempt())
    command = launch_command(world_size, sys.argv)
    # Replaces this process, whose id stays valid for whoever signals or waits for it.
    os.execvp(command[0], command)


def launch_command(world_size: int, command: list[str]) -> list[str]:
    """Return the command that starts ``world_size`` copies of a script with arguments.

    Uses torchrun, under srun in a Slurm allocation of several machines. Raises TrainingError if the
    processes cannot be divided evenly or Slurm does not answer.
    """
    n_nodes = _allocated_nodes()
    if n_nodes == 1:
        return [
            sys.executable,
            *TORCHRUN,
            "--standalone",
            # The default is the host's name, which may not resolve.
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={world_size}",
            *command,
        ]
    if world_size % n_nodes:
        raise TrainingError(
            f"{world_size} processes cannot be spread evenly over the {n_nodes} nodes of this job;"
            f" set training.world_size to a multiple of {n_nodes}"
        )
    n_local = world_size // n_nodes
    flags = (f"--nnodes={n_nodes}", f"--nproc-per-node={n_local}", f"--master-port={free_port()}")
    torchrun = shlex.join([sys.executable, *TORCHRUN, *flags])
    # srun tells each task its node and the first one's address.
    there = '--master-addr="$SLURM_LAUNCH_NODE_IPADDR" --node-rank="$SLURM_NODEID"'
    srun = ["srun", f"--nodes={n_nodes}", f"--ntasks={n_nodes}", "--ntasks-per-node=1"]
    # Otherwise one node's failure would leave the others waiting for it.
    srun += ["--kill-on-bad-exit=1"]
    return [*srun, "sh", "-c", f'exec {torchrun} {there} "$@"', "sh", *command]


def _allocated_nodes() -> int:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return 1
    # Snakemake's job step drops SLURM_JOB_NUM_NODES from the environment.
    asked = ["squeue", "--noheader", f"--jobs={job}", "--format=%D"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SLURM_S, check=True)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise TransientError(
            f"{shlex.join(asked)}: cannot count the nodes of job {job} ({error}); run again"
        ) from error


def free_port() -> int:
    """Find a free port below the ephemeral range; TrainingError if there is none."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise TrainingError(
        f"ports {PORTS.start} to {PORTS.stop - 1}: none is free on {socket.gethostname()};"
        " stop what uses them there, or train on one node"
    )
