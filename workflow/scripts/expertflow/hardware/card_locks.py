"""Choose free cards for a job, so that concurrent jobs do not all use the first one."""

import logging
import os
import tempfile
from pathlib import Path
from typing import IO

from expertflow.core.locks import try_lock
from expertflow.hardware.nvml import open_gpus

log = logging.getLogger(__name__)
# Kept open: a lock lasts as long as its file is open, even through an exec.
_locks: list[IO[bytes]] = []


def lock_cards(n: int) -> None:
    """Lock ``n`` visible cards until this process ends; hide the others from CUDA and the monitor.

    Jobs of all users of a machine respect each other's locks, if they share a folder for temporary
    files (/tmp unless TMPDIR is set); cards whose memory others use come last. If too few cards are
    free, the others are shared: nothing waits. Processes of a launcher already have their cards, as
    do those that Slurm may spread over several machines. Call before CUDA starts.
    """
    if "RANK" in os.environ or (n > 1 and "SLURM_JOB_ID" in os.environ):
        return
    with open_gpus() as gpus:
        figures = ("gpu_name", "uuid", "memory_used_bytes")
        seen = [[device.read_figure(name) for name in figures] for device in gpus.devices]
    # A plan is for cards of the first one's kind. A card without a UUID cannot be selected.
    usable = [card for card in seen if card[1] is not None and card[0] == seen[0][0]]
    # In whole GiB: a driver or a desktop uses a little on each.
    cards = [card[1] for card in sorted(usable, key=lambda card: (card[2] or 0) >> 30)]
    if len(cards) < n:
        return
    folder, taken = Path(tempfile.gettempdir()), list[str]()
    try:
        for uuid in cards:
            if len(taken) < n and _lock(folder / f"expertflow-{uuid}.lock"):
                taken.append(uuid)
    except OSError as error:
        log.warning("%s: cards cannot be locked (%s); concurrent jobs may share", folder, error)
    if len(taken) < n:
        log.warning("%d of %d cards are free: the others are shared with jobs", len(taken), n)
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
    # Every user may write to the folder: follow no link from another user, block on no pipe.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        # O_CREAT only here: in a sticky folder, Linux rejects it for another user's file.
        number = os.open(path, flags | os.O_CREAT)
        # Read access is enough to lock a file; grant it whatever this user's umask.
        os.fchmod(number, 0o644)
        return number
