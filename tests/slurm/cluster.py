"""A one-machine Slurm: three nodes on loopback, two of them with two simulated cards.

By hand, to try the profile on it, until Ctrl-C:  python tests/slurm/cluster.py
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# The job step drops SLURM_CONF from the environment, so the configuration must be where Slurm
# looks by default.
ETC = Path("/etc/slurm")
CONFIGURATION = ("slurm.conf", "gres.conf")
OURS = "# expertflow test cluster in "
LOCK = Path(tempfile.gettempdir(), "expertflow-test-cluster.lock")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
PLACES = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
PACKAGES = "munge slurmctld slurmd slurm-client"
NODES = {"cpu1": "", "gpu1": "gpu:h100:2", "gpu2": "gpu:h100:2"}
PATIENCE_S = 180

# config_overrides: nodes may claim more than this machine has, so that jobs of 4 CPUs fit on 2.
# cons_tres: the only selection that supports cards. linuxproc, none: no cgroups needed.
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
GresTypes=gpu
SlurmdParameters=config_overrides
MinJobAge=3600
KillWait=30
MessageTimeout=60
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0
SlurmctldTimeout=30
SlurmdTimeout=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=cpu Nodes=cpu1 Default=YES PreemptMode=OFF
PartitionName=gpu Nodes=gpu1,gpu2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=gpuhi Nodes=gpu1,gpu2 PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=128000"
)
# A card needs its own file to be counted; any device file will do.
GRES = """\
NodeName=gpu1,gpu2 Name=gpu Type=h100 File=/dev/null
NodeName=gpu1,gpu2 Name=gpu Type=h100 File=/dev/zero
"""


def lacking() -> str | None:
    """Return why no cluster can be started here, or null."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PLACES["PATH"]) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install --no-install-recommends {PACKAGES}"
    if os.geteuid() != 0:
        return "only root may start slurmd"
    for name in CONFIGURATION:
        if not _is_ours(ETC / name):
            return f"{ETC / name} is somebody's: this machine may belong to a real cluster"
    return None


@contextmanager
def running_cluster() -> Iterator[None]:
    """Start the cluster, wait until its nodes are idle, and stop it whatever happens.

    A machine runs one at a time: another waits for this one to end.
    """
    with LOCK.open("w") as lock, ExitStack() as reserved:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep()
        folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            _configure(folder, [_reserve_port(reserved) for _ in range(1 + len(NODES))])
            _start(folder)
            yield
        finally:
            _stop(folder)
            _sweep()


class Entry(NamedTuple):
    id: str
    state: str
    partition: str
    n_nodes: int


def queue(*, ended: bool = False) -> list[Entry]:
    """List waiting and running jobs in order of submission; with ``ended`` also ended ones."""
    states = ["--states=all"] if ended else []
    out = _run("squeue", "--noheader", "--sort=i", "--format=%i %T %P %D", *states)
    rows = [line.split() for line in out.splitlines()]
    return [Entry(*row[:3], int(row[3])) for row in rows]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=PLACES, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _is_ours(path: Path) -> bool:
    return not path.exists() or path.read_text().startswith(OURS)


def _reserve_port(reserved: ExitStack) -> int:
    """Return a port that nobody else gets while it is reserved; a daemon may bind it again."""
    holder = reserved.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port


def _configure(folder: Path, ports: list[int]) -> None:
    folder.chmod(0o755)  # munged insists that others can reach its socket
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    nodes = [
        NODE.format(name=name, port=port) + (f" Gres={gres}" if gres else "")
        for port, (name, gres) in zip(ports[1:], NODES.items(), strict=True)
    ]
    first = f"{OURS}{folder}\n"
    # Nodes come before the partitions that name them.
    config, partitions = CONFIG.format(folder=folder, port=ports[0]).split("PartitionName", 1)
    text = first + config + "\n".join(nodes) + "\nPartitionName" + partitions
    ETC.mkdir(exist_ok=True)
    (ETC / "gres.conf").write_text(first + GRES)
    (ETC / "slurm.conf").write_text(text)


def _start(folder: Path) -> None:
    places = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
    places |= {"log-file": "munged.log", "seed-file": "munge.seed"}
    _run("munged", *(f"--{key}={folder / name}" for key, name in places.items()))
    _run("slurmctld", "-c")
    for name in NODES:
        (folder / f"spool.{name}").mkdir()
        _run("slurmd", "-N", name)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        states = _run("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
        if {line.split()[0] for line in states if line.endswith(" idle")} == set(NODES):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the nodes did not become idle: {states}; see {folder}")


def _stop(folder: Path) -> None:
    """End the jobs, which would outlive the daemons, then the daemons by their pid files."""
    daemons = list(_daemons(folder))
    if any(daemon.name() == "slurmctld" for daemon in daemons):
        _end_jobs()
    for daemon in daemons:
        daemon.terminate()
    for daemon in psutil.wait_procs(daemons, timeout=10)[1]:
        daemon.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _end_jobs() -> None:
    jobs = [entry.id for entry in queue()]
    if jobs:
        _run("scancel", *jobs)
    deadline = time.monotonic() + PATIENCE_S
    while queue() and time.monotonic() < deadline:
        time.sleep(0.2)


def _daemons(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes that are still our daemons; an id may have been reused."""
    for path in folder.glob("*.pid"):
        with suppress(ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int(path.read_text()))
            if process.name() in PROGRAMS and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _sweep() -> None:
    """Remove the configuration, and leftovers of a killed cluster."""
    path = ETC / "slurm.conf"
    if path.exists() and _is_ours(path):
        folder = Path(path.read_text().splitlines()[0].removeprefix(OURS))
        if folder.is_dir():
            _stop(folder)
        for name in CONFIGURATION:
            (ETC / name).unlink(missing_ok=True)


def main() -> None:
    reason = lacking()
    if reason:
        sys.exit(f"error: {reason}")
    start_s = time.monotonic()
    with running_cluster():
        print(f"up in {time.monotonic() - start_s:.1f} s; Ctrl-C ends it", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
