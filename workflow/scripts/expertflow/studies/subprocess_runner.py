"""Run trials one after another, each in its own process, which starts at once.

Kernels, compiled code, precision switches and peaks of memory outlive a run within its process. So
one warm process imports the training code and touches no card, and forks for every trial.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from expertflow.core.errors import ExpertflowError, Interrupted, TrainingError
from expertflow.core.files import remove
from expertflow.core.process import SIGNALS
from expertflow.train.processes import RANK
from expertflow.train.trial import Trial, TrialResult, run_trial

# What a trial needs, imported once.
PRELOADED = ["expertflow.train.trial", "transformers.models.qwen3"]
if find_spec("bitsandbytes") is None:
    # Else peft imports that, which starts CUDA; and in a process that forks afterwards it is of no
    # use to any trial.
    PRELOADED.append("peft")
# With it, torch asks the driver whether there is a card. Else it asks CUDA, after which no process
# that forks could use the card; transformers asks as it is imported, where flash-attn is installed.
ASK_THE_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
# A child that is asked to stop ends after its step.
PATIENCE_S = 60


class TrialRunner:
    """Runs each trial in its own process, which is ended after ``limit_s`` without a result."""

    def __init__(self, *, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        # Before the warm process starts, which has this environment.
        os.environ[ASK_THE_DRIVER] = "1"
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def run(self, trial: Trial) -> TrialResult:
        """Run one, in which a process that is killed, e.g. for memory, is a result.

        Raises:
            Interrupted: this process was told to stop; the child was, too.
            TrainingError: the plan cannot be run at all.
        """
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run_child, args=(trial, there))
        answer: Any = None
        with interruptible():
            try:
                process.start()
                there.close()
                if not here.poll(self._limit_s):
                    said = f"no result after {self._limit_s:g} s"
                    return TrialResult(outcome="failed", problem=said)
                with suppress(EOFError):
                    answer = here.recv()
                process.join()
            finally:
                _end(process)
        if isinstance(answer, TrialResult):
            return answer
        if answer is not None:
            raise TrainingError(answer)
        code = process.exitcode or 0
        if code == -signal.SIGKILL:
            said = "the process was killed (SIGKILL): most likely the host's memory ran out"
            return TrialResult(outcome="out of memory", problem=said)
        if code in (-signal.SIGTERM, -signal.SIGINT, 143):
            raise Interrupted("a trial was told to stop")
        return TrialResult(outcome="failed", problem=f"the process ended with code {code}")


def _run_child(trial: Trial, answer: Connection) -> None:
    try:
        answer.send(run_trial(trial))
    except ExpertflowError as error:
        answer.send(" ".join(str(error).split()))
    except (Interrupted, BrokenPipeError):
        # Who asked may have been told to stop, and listens no more.
        raise SystemExit(143) from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first signal into an error, so that what was begun is cleared away; ignore more."""

    def stop(number: int, _: object) -> None:
        _ignore()
        raise Interrupted(f"signal {number}")

    before = {n: signal.signal(n, stop) for n in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: Any) -> None:
    """Tell a child to end, which it does after its step; leave none behind."""
    if process.pid is not None and process.is_alive():
        # A second signal must not keep the child from being ended.
        _ignore()
        process.terminate()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[None]:
    """Work in an empty folder and leave none behind; helpers share that of the first process."""
    rank = os.environ.get(RANK)
    if rank is None:
        remove(folder)
        folder.mkdir(parents=True)
    try:
        yield
    finally:
        if rank in (None, "0"):
            remove(folder)
