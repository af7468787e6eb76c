"""Trainers in forks of one warm process; see ``trainer_server.py``."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import ROOT, SCRIPTS

Fault = tuple[str, int, int]


class Trainers:
    def __init__(self) -> None:
        paths = f"{SCRIPTS}:{ROOT / 'tests'}:{ROOT / 'tests' / 'train'}"
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trainer_server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={
                **os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._server.pid

    def ask(self, folder: Path, **request: Any) -> None:
        assert self._server.stdin
        request = {"fault": None, "n_processes": None, "function": None, **request}
        self._server.stdin.write(json.dumps({"folder": str(folder), **request}) + "\n")
        self._server.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._server.stdout
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def train(self, folder: Path, fault: Fault | None = None, **request: Any) -> dict[str, Any]:
        self.ask(folder, fault=fault, **request)
        return self.answer()

    def finish(self, folder: Path, **request: Any) -> dict[str, Any]:
        """Train a tiny run to its end, and return its record."""
        answer = self.train(folder, **request)
        assert answer == {"code": 0, "fired": False}, (folder / "log").read_text()
        record: dict[str, Any] = json.loads((folder / "training.json").read_text())
        return record

    def call(self, function: Callable[[Path], None], folder: Path) -> None:
        """Call a function of a test's module in two processes."""
        name = f"{function.__module__}:{function.__name__}"
        answer = self.train(folder, function=name, n_processes=2)
        assert answer["code"] == 0, (folder / "log").read_text()

    def refuse(self, folder: Path, **request: Any) -> str:
        """Have a run fail, and return the last line it said."""
        assert self.train(folder, **request)["code"] == 1
        return (folder / "log").read_text().splitlines()[-1]

    def close(self) -> None:
        self._server.communicate(timeout=180)
