"""What the first process decides for all: whether there is a run, and from where it goes on."""

import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from expertflow.core.errors import TrainingError
from expertflow.train.processes import PATIENCE, RANK, Processes
from expertflow.train.saved import checkpoint_files

GO_ON = "expertflow/go_on"
POLL_S = 0.5
# Another node's view of a shared file system may be a minute old.
SEEN_WITHIN_S = 180.0
NO_STEP = -1


class Word:
    """The first process's word to those that were started with it; there may be none.

    It waits at a lock for as long as it takes, and a group of processes that is being formed does
    not.
    """

    def __init__(self) -> None:
        several = RANK in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
        # Kept, as it may be this process that others ask.
        self._store = next(rendezvous("env://", timeout=PATIENCE))[0] if several else None

    def give(self, *, go_on: bool) -> None:
        """Tell the others whether there is something left to train."""
        if self._store is not None:
            self._store.set(GO_ON, str(int(go_on)))

    def wait(self) -> bool:
        """Wait until it is told whether there is something left to train.

        Raises:
            TrainingError: the first process ended without a word.
        """
        assert self._store is not None, "there is no first process to wait for"
        try:
            while not self._store.check([GO_ON]):
                time.sleep(POLL_S)
            return bool(int(self._store.get(GO_ON)))
        except dist.DistError as error:
            raise TrainingError(
                f"process {os.environ[RANK]}: the first process ended before training began; see"
                " what it said, and run again"
            ) from error


def chosen(
    own: Path | None, state: Path, processes: Processes, *, within_s: float = SEEN_WITHIN_S
) -> Path | None:
    """Give the first process's checkpoint instead of one's ``own``. A collective.

    What another node sees of a shared file system may be older; it is waited for ``within_s``.

    Raises:
        TrainingError: this process does not see the checkpoint, or not whole.
    """
    if processes.world_size == 1:
        return own
    mine = NO_STEP if own is None else checkpoint_files.step_of(own)
    [step], *_ = processes.of_all(mine)
    if step == NO_STEP:
        return None
    directory = checkpoint_files.directory_of(state, step)
    deadline_s = time.monotonic() + within_s
    while (found := checkpoint_files.damage(directory)) is not None:
        if time.monotonic() >= deadline_s:
            raise TrainingError(
                f"{directory}: process {processes.rank} cannot go on from it as the first one does,"
                f" {found}; see that all nodes share the folder, and run again"
            )
        time.sleep(POLL_S)
        # A folder that is listed is asked for anew, where one that was missed is remembered.
        list(state.glob("checkpoints/*"))
    return directory


def check_step(step: int, processes: Processes) -> None:
    """Make sure that all processes go on from the same step. A collective.

    Raises:
        TrainingError: they do not.
    """
    steps = [step for (step,) in processes.of_all(step)]
    if len(set(steps)) > 1:
        raise TrainingError(
            f"the processes would go on after different steps ({', '.join(map(str, steps))}); see"
            " that all nodes share the state's folder, and run again"
        )
