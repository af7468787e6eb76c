"""What starts the processes that train together: torchrun, under srun where nodes are several."""

import contextlib
import os
import random
import shlex
import socket
import subprocess
import sys

from expertflow.core.errors import TrainingError

TORCHRUN = ("-m", "torch.distributed.run")
PATIENCE_S = 60
PORTS = range(20_000, 32_000)


def launcher(world_size: int, command: list[str]) -> list[str]:
    """Give the command that starts ``command``, a script with its arguments, so many times.

    In a Slurm allocation of several machines it starts one torchrun on each. The first process is
    on the first of them, where the job runs and the run is watched, so ranks are handed out by
    machine rather than in the order of arrival.

    Raises:
        TrainingError: the processes cannot be shared out evenly, or Slurm does not answer.
    """
    n_nodes = allocated_nodes()
    if n_nodes == 1:
        return [
            sys.executable,
            *TORCHRUN,
            "--standalone",
            # By itself it takes the host's name, which need not be one that can be resolved.
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
    # srun tells each task which node it is on, and the first one's address.
    there = '--master-addr="$SLURM_LAUNCH_NODE_IPADDR" --node-rank="$SLURM_NODEID"'
    srun = ["srun", f"--nodes={n_nodes}", f"--ntasks={n_nodes}", "--ntasks-per-node=1"]
    # Without it, one node's failure would leave the others waiting for it.
    srun += ["--kill-on-bad-exit=1"]
    return [*srun, "sh", "-c", f'exec {torchrun} {there} "$@"', "sh", *command]


def allocated_nodes() -> int:
    """Count the nodes of the Slurm job around this process; 1 where there is none.

    Raises:
        TrainingError: Slurm does not answer.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return 1
    # Snakemake's job step drops SLURM_JOB_NUM_NODES from the environment.
    asked = ["squeue", "--noheader", f"--jobs={job}", "--format=%D"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise TrainingError(
            f"{shlex.join(asked)}: how many nodes job {job} has is not known: {error}; run again"
        ) from error


def free_port() -> int:
    """Find a port that is free on this machine, which is the first node.

    Torchrun takes it seconds later. The ports that the system gives to whoever asks for any lie
    above these, so that one of those is not gone by then.

    Raises:
        TrainingError: none is free.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise TrainingError(
        f"ports {PORTS.start} to {PORTS.stop - 1}: none can be taken on {socket.gethostname()};"
        " end what holds them there, or train on one node"
    )
