"""Run trainers that are killed at chosen points, each in a fork of one warm process.

Reads one JSON object a line: ``folder`` of a tiny run, and ``fault``, null or [point, n, signal].
The n-th time the trainer comes to the point, it gets the signal; instead, ``after_s`` and
``number`` send one after some seconds. Answers with one JSON line: the exit code, negative for a
signal, and whether the fault came.

Points are ``enter:`` or ``exit:`` with a part of the clock (forward, checkpoint ...), or with a
function of FUNCTIONS. Importing torch takes seconds; a fork starts at once.
"""

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import SCRIPTS

from expertflow.core import files
from expertflow.train import job
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.timing import Clock

# What a checkpoint goes through, and how a run ends.
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "take": (checkpoint, "take_snapshot"),
    "save_file": (checkpoint, "save_file"),
    "sync": (files, "sync"),
    "sync_directory": (files, "sync_directory"),
    "prune": (checkpoint_files, "prune_checkpoints"),
    "hide": (checkpoint_files, "hide_checkpoint"),
    "export": (job.publish, "write_candidates"),
    "candidate": (job.publish, "_export"),
    "unmoved": (job.publish, "check_inputs_unmoved"),
    "publish": (job.publish, "publish_results"),
}


class Fault:
    def __init__(self, point: str, n: int, number: int, fired: Path) -> None:
        self.point, self.left, self.number, self.fired = point, n, number, fired

    def at(self, point: str) -> None:
        if point != self.point:
            return
        self.left -= 1
        if self.left == 0:
            self.fired.touch()
            os.kill(os.getpid(), self.number)

    def install(self) -> None:
        part = Clock.part

        @contextmanager
        def watched_part(clock: Clock, name: str) -> Iterator[None]:
            self.at(f"enter:{name}")
            with part(clock, name):
                yield
            self.at(f"exit:{name}")

        Clock.part = watched_part  # type: ignore[method-assign]
        for name, (module, attribute) in FUNCTIONS.items():
            setattr(module, attribute, self._watched(name, getattr(module, attribute)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.at(f"enter:{name}")
            result = function(*args, **kwargs)
            self.at(f"exit:{name}")
            return result

        return watched


def train(folder: Path, fault: list[Any] | None) -> None:
    sys.stdout.flush()
    with (folder / "log").open("a") as stream:
        os.dup2(stream.fileno(), 2)
    os.dup2(2, 1)
    if fault is not None:
        Fault(fault[0], fault[1], fault[2], folder / "fired").install()
    sys.argv = ["train_expert.py", "--results", str(folder), "--code", "c"]
    sys.argv += ["--output", str(folder / "training.json")]
    try:
        runpy.run_path(str(SCRIPTS / "train_expert.py"), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
    os._exit(99)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        fired = folder / "fired"
        fired.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            train(folder, request["fault"])
        if "after_s" in request:
            time.sleep(request["after_s"])
            os.kill(child, request["number"])  # not waited for yet, so it is still there
        _, status = os.waitpid(child, 0)
        answer = {"code": os.waitstatus_to_exitcode(status), "fired": fired.exists()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import peft  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    serve()
