"""Run trials one after another, each in its own process, without startup cost.

Kernels, compiled code, precision switches and memory peaks outlive a run within its process, so one
warm process imports the training code, touches no card, and forks for every trial.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

from expertflow.core.errors import STOPPED, ExpertflowError, Interrupted, TrainingError, single_line
from expertflow.core.files import remove
from expertflow.core.process import SIGNALS, record_signals
from expertflow.train.processes import RANK
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial, run_trial

# Imported once for all trials.
PRELOADED = ["expertflow.train.trial", "transformers.models.qwen3"]
if find_spec("bitsandbytes") is None:
    # Otherwise peft imports it, which starts CUDA, and a forked trial could not use CUDA.
    PRELOADED.append("peft")
# With it, torch asks the driver whether there is a card. Without it, torch asks CUDA, after which
# no forked process could use the card; transformers asks at import if flash-attn is installed.
ASK_THE_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
PYTHONPATH, SCRIPTS = "PYTHONPATH", Path(__file__).resolve().parents[2]
# A trial without a result by then is hung: loading and compiling a large model takes minutes.
LIMIT_S = 1800.0
# A child asked to stop ends after its step.
PATIENCE_S = 60


class TrialRunner:
    """Runs each trial in its own process, killed after ``limit_s`` without a result."""

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        # Before the warm process starts, which inherits the environment.
        os.environ[ASK_THE_DRIVER] = "1"
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        # The forkserver is a new interpreter, which imports PRELOADED before any trial is sent;
        # Python 3.11 does not pass sys.path to it.
        places = filter(None, (str(SCRIPTS), os.environ.get(PYTHONPATH)))
        with mock.patch.dict(os.environ, {PYTHONPATH: os.pathsep.join(places)}):
            ensure_running()

    def run(self, trial: Trial) -> TrialResult:
        """Run one trial; a killed process, e.g. by the OOM killer, is a result.

        Raises Interrupted if both processes were stopped, TrainingError if the plan cannot run.
        """
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run_child, args=(trial, there))
        answer: Any = None
        with interruptible():
            try:
                process.start()
                there.close()  # or recv would wait for our own copy of it
                if not here.poll(self._limit_s):
                    reason = f"no result after {self._limit_s:g} s"
                    return TrialResult(outcome="failed", problem=reason)
                with suppress(EOFError):  # killed before it answered
                    answer = here.recv()
                # Its answer counts even if it never releases a worker or the card.
                process.join(PATIENCE_S)
            finally:
                _end(process)
        if isinstance(answer, TrialResult):
            return answer
        if answer is not None:
            raise TrainingError(answer)
        code = process.exitcode or 0
        # Not sent by us: trials that we kill return or raise above.
        if code == -signal.SIGKILL:
            reason = "the process was killed (SIGKILL): most likely the host ran out of memory"
            return TrialResult(outcome="out of memory", problem=reason)
        if code in (-signal.SIGTERM, -signal.SIGINT, STOPPED):
            raise Interrupted("a trial was stopped")
        return TrialResult(outcome="failed", problem=f"the process exited with code {code}")


def _run_child(trial: Trial, answer: Connection) -> None:
    try:
        answer.send(run_trial(trial))
    except ExpertflowError as error:
        answer.send(single_line(error))
    except (Interrupted, BrokenPipeError):
        # The parent may have been stopped and no longer listen.
        raise SystemExit(STOPPED) from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first signal into an error so that cleanup runs; ignore further ones."""

    def stop(number: int, _: object) -> None:
        _ignore()
        raise Interrupted(f"signal {number}")

    # It restores the handlers, and leaves SIGHUP ignored under nohup.
    with record_signals(ignorable=[signal.SIGHUP]):
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, stop)
        yield


def _end(process: Any) -> None:
    if process.pid is not None and process.is_alive():
        # A second signal must not prevent ending the child.
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
    """Provide an empty folder, then remove it; helper processes share rank 0's."""
    rank = os.environ.get(RANK)
    if rank is None:
        remove(folder)
        folder.mkdir(parents=True)
    try:
        yield
    finally:
        if rank in (None, "0"):
            remove(folder)
