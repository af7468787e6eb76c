"""Choose free cards for a job, so that jobs that run at once do not all use the first one."""

import logging
import os
import tempfile
from pathlib import Path
from typing import IO

from expertflow.core.locks import try_lock
from expertflow.hardware.nvml import open_gpus

log = logging.getLogger(__name__)
# Kept open: a lock lasts as long as its file, through an exec too.
_locks: list[IO[bytes]] = []


def lock_cards(n: int) -> None:
    """Lock ``n`` visible cards until this process ends; hide the others from CUDA and the monitor.

    Jobs of all users of a machine respect each other's locks, if they have the same folder for
    temporary files (/tmp, where TMPDIR names none); cards whose memory others hold come last. If
    too few cards are free, the rest are shared: nothing waits. Processes of a launcher have their
    cards already, as have those that Slurm may spread over several machines. Call before CUDA
    starts.
    """
    if "RANK" in os.environ or (n > 1 and "SLURM_JOB_ID" in os.environ):
        return
    with open_gpus() as gpus:
        figures = ("gpu_name", "uuid", "memory_used_bytes")
        seen = [[device.read_figure(name) for name in figures] for device in gpus.devices]
    # A plan is for cards of the first one's kind. One without a UUID cannot be named.
    usable = [card for card in seen if card[1] is not None and card[0] == seen[0][0]]
    # In whole GiB: a driver or a desktop holds a little of each.
    cards = [card[1] for card in sorted(usable, key=lambda card: (card[2] or 0) >> 30)]
    if len(cards) < n:
        return
    folder, taken = Path(tempfile.gettempdir()), list[str]()
    try:
        for uuid in cards:
            if len(taken) < n and _lock(folder / f"expertflow-{uuid}.lock"):
                taken.append(uuid)
    except OSError as error:
        log.warning("%s: cards cannot be locked (%s); jobs at once may share one", folder, error)
    if len(taken) < n:
        log.warning("%d of %d cards are free: other jobs use the rest, too", len(taken), n)
    taken += [uuid for uuid in cards if uuid not in taken]
    if n < len(seen):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken[:n])


def _lock(path: Path) -> bool:
    stream = open(path, "rb", opener=_open_for_all)  # noqa: SIM115
    if try_lock(stream) == "held":
        stream.close()
        return False
    os.set_inheritable(stream.fileno(), True)
    _locks.append(stream)
    return True


def _open_for_all(path: str, flags: int) -> int:
    # Every user may write to the folder: follow no link that another one laid, wait at no pipe.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        # Only here O_CREAT: in a sticky folder, Linux refuses it for another user's file.
        number = os.open(path, flags | os.O_CREAT)
        # To lock a file it is enough to read it, whatever this user's umask.
        os.fchmod(number, 0o644)
        return number
