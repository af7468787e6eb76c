"""Run trainers in forks of one warm process, and kill them at chosen points.

Importing torch takes seconds; a fork starts at once. The process reads one JSON object per line and
answers each with one: the exit code, negative for a signal, and whether the fault occurred.

- ``folder``: that of a tiny run; output goes to ``log`` in it.
- ``function``: ``module:name`` of a function to call with the folder, instead of the trainer.
- ``n_processes``: as many as a launcher would start; null: without a launcher.
- ``fault``: null or [point, n, signal]. The n-th time the first process reaches the point, it gets
  the signal. Points are ``enter:`` or ``exit:`` with a part of the clock (forward, checkpoint ...),
  or with a function in FUNCTIONS.
- ``after_s`` and ``number``: send that signal after some seconds.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import ROOT, SCRIPTS
from torch.distributed import TCPStore

from expertflow.core import files
from expertflow.train import job, preflight
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.timing import Clock

# The steps of writing a checkpoint, and the end of a run.
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "take": (checkpoint, "take_snapshot"),
    "save_file": (checkpoint, "save_file"),
    "sync": (files, "sync"),
    "sync_directory": (files, "sync_directory"),
    "prune": (checkpoint_files, "prune_checkpoints"),
    "hide": (checkpoint_files, "hide_checkpoint"),
    "export": (job.publish, "write_candidates"),
    "candidate": (job.publish, "_export"),
    "publish": (job.publish, "publish_results"),
}
PORT_DIGITS = 6
Fault = tuple[str, int, int]


def install(fault: Fault, fired: Path) -> None:
    wanted, n, number = fault
    came = []

    def at(point: str) -> None:
        if point == wanted:
            came.append(point)
            if len(came) == n:
                fired.touch()
                os.kill(os.getpid(), number)

    def watch(place: Any, attribute: str, name: str) -> None:
        function = getattr(place, attribute)

        def watched(*args: Any, **kwargs: Any) -> Any:
            at(f"enter:{name}")
            result = function(*args, **kwargs)
            at(f"exit:{name}")
            return result

        setattr(place, attribute, watched)

    part = Clock.part

    @contextmanager
    def watched_part(clock: Clock, name: str) -> Iterator[None]:
        at(f"enter:{name}")
        with part(clock, name):
            yield
        at(f"exit:{name}")

    Clock.part = watched_part  # type: ignore[method-assign]
    for name, (module, attribute) in FUNCTIONS.items():
        watch(module, attribute, name)


def run(request: dict[str, Any]) -> None:
    """Run the trainer or a function in this process, and exit."""
    folder, fault = Path(request["folder"]), request["fault"]
    sys.stdout.flush()
    with (folder / "log").open("a") as stream:
        os.dup2(stream.fileno(), 2)
    os.dup2(2, 1)
    if fault is not None and os.environ.get("RANK", "0") == "0":
        install(fault, folder / "fired")
    script = str(SCRIPTS / "train_expert.py")
    sys.argv = [script, "--results", str(folder), "--code", "c"]
    sys.argv += ["--output", str(folder / "training.json")]
    code: Any = 0
    try:
        if request["function"]:
            module, name = request["function"].split(":")
            getattr(importlib.import_module(module), name)(folder)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - a fork must not go on as the server
        code = traceback.format_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def launch(n: int, request: dict[str, Any]) -> None:
    """Act like torchrun for ``n`` processes: keep their store, stop all when one fails."""
    reader, writer = os.pipe()
    children = []
    for rank in range(n):
        child = os.fork()
        if child == 0:
            join(rank, n, reader)
            run(request)
        children.append(child)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, f"{store.port:0{PORT_DIGITS}}".encode() * n)
    codes = []
    while children:
        child, status = os.wait()
        children.remove(child)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] not in (0, 128 + signal.SIGTERM):
            for other in children:
                os.kill(other, signal.SIGKILL)
    os._exit(1 if any(codes) else 0)


def join(rank: int, n: int, reader: int) -> None:
    port = int(os.read(reader, PORT_DIGITS))
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        fired = Path(request["folder"]) / "fired"
        fired.unlink(missing_ok=True)
        child = os.fork()
        if child == 0 and request["n_processes"]:
            launch(request["n_processes"], request)
        if child == 0:
            run(request)
        if "after_s" in request:
            time.sleep(request["after_s"])
            os.kill(child, request["number"])  # not collected yet, so it still exists
        _, status = os.waitpid(child, 0)
        answer = {"code": os.waitstatus_to_exitcode(status), "fired": fired.exists()}
        print(json.dumps(answer), flush=True)


class Trainers:
    def __init__(self) -> None:
        paths = f"{SCRIPTS}:{ROOT / 'tests'}:{ROOT / 'tests' / 'train'}"
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={
                **os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip

    def ask(self, folder: Path, **request: Any) -> None:
        assert self.server.stdin
        request = {"fault": None, "n_processes": None, "function": None, **request}
        self.server.stdin.write(json.dumps({"folder": str(folder), **request}) + "\n")
        self.server.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.server.stdout
        answer: dict[str, Any] = json.loads(self.server.stdout.readline())
        return answer

    def train(self, folder: Path, fault: Fault | None = None, **request: Any) -> dict[str, Any]:
        self.ask(folder, fault=fault, **request)
        return self.answer()

    def finish(self, folder: Path, **request: Any) -> dict[str, Any]:
        """Train a tiny run to completion, and return its record."""
        answer = self.train(folder, **request)
        assert answer == {"code": 0, "fired": False}, (folder / "log").read_text()
        record: dict[str, Any] = json.loads((folder / "training.json").read_text())
        return record

    def call(self, function: Callable[[Path], None], folder: Path) -> None:
        """Call a function of a test's module in two processes."""
        name = f"{function.__module__}:{function.__name__}"
        answer = self.train(folder, function=name, n_processes=2)
        assert answer["code"] == 0, (folder / "log").read_text()

    def close(self) -> None:
        self.server.communicate(timeout=180)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import peft  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # kept, as for other models
    preflight.CPU_WIDTH = 64  # no test reads how fast this CPU is
    gc.freeze()  # or each fork's collections would copy all pages
    serve()
