"""Two processes, the second of which sees an old listing of the checkpoints.

Started by ``test_processes.py``, with the folder of a run that was saved after steps 2 and 4 of 4.
"""

import shutil
import sys
from pathlib import Path

import pytest
from tiny_run import assigned

from expertflow.core.errors import TrainingError
from expertflow.train import job
from expertflow.train.processes import start_processes
from expertflow.train.saved import checkpoint, checkpoint_files


def main(folder: Path) -> None:
    inputs = assigned(folder)
    state, processes = inputs.state, start_processes(inputs.plan)
    rank = processes.rank
    assert processes.of_all(rank, 7) == [[0, 7], [1, 7]]
    old, new = checkpoint_files.complete_checkpoints(state)

    assert checkpoint.agree_on((new, old)[rank], state, processes) == new
    assert checkpoint.agree_on((new, None)[rank], state, processes) == new
    assert checkpoint.agree_on((None, new)[rank], state, processes) is None

    mine = folder / f"state-{rank}"
    shutil.copytree(state, mine)
    if rank == 1:
        shutil.rmtree(mine / "checkpoints" / new.name)
        with pytest.raises(TrainingError, match="process 1 cannot go on from it"):
            checkpoint.agree_on(old, mine, processes, within_s=0.0)
    else:
        checkpoint.agree_on(new, mine, processes, within_s=0.0)

    if rank == 1:
        checkpoint_files.newest_checkpoint = lambda _: old
    outcome = job.train_expert(inputs, processes)
    assert outcome.resumed_at_steps == (4,)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
