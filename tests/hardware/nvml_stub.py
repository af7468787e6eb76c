"""Build a stub of the NVIDIA driver, and run programs with it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, SCRIPTS, wait_for

SOURCE = Path(__file__).parent / "data" / "nvml_stub.c"
# A card as a scenario: everything supported. Names begin with SIMULATED, so samples are marked.
CARD: dict[str, Any] = {
    "driver": "SIMULATED 580.65", "name": "SIMULATED H100", "uuid": "GPU-aaa", "count": 1,
    "memory_total": 80 * 10**9, "memory_used": 60 * 10**9, "utilization": 95, "temperature": 60,
    "power": 600_000, "power_limit": 700_000, "energy": 10**9, "energy_step": 500_000,
    "sm_clock": 1755, "memory_clock": 2619, "reasons": 0, "limit.0": 92, "limit.1": 89,
    "limit.3": 85, "gpm": 1, "gpm.5": 40, "gpm.2": 85, "gpm.20": 100, "gpm.21": 200,
    "mig": 0,
}  # fmt: skip


def build(folder: Path) -> Path:
    """Compile the library into ``folder``; skip the test without a compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: the stub of the NVIDIA driver cannot be built")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return folder


def write(folder: Path, **changes: Any) -> Path:
    """Write a scenario: the card above with changes; null leaves a figure out.

    A double underscore stands for a dot, as in ``fail__power``, and ``of1__`` for card 1.
    """
    lines = {**CARD, **{key.replace("__", "."): value for key, value in changes.items()}}
    path, new = folder / "scenario", folder / "scenario.new"
    new.write_text("".join(f"{k}={v}\n" for k, v in lines.items() if v is not None))
    # A concurrent reader sees either the old or the new file.
    return new.replace(path)


def environment(library: Path, scenario: Path, **settings: str) -> dict[str, str]:
    hidden = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    # This machine's own libraries, if needed, come after it.
    libraries = filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH")])
    own = {"LD_LIBRARY_PATH": ":".join(libraries), "NVML_SCENARIO": str(scenario)}
    return {**kept, **own, "PYTHONPATH": str(SCRIPTS), **settings}


def script(
    name: str, *arguments: str, env: dict[str, str], until: Callable[[], bool] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of the project's scripts, and stop it as soon as ``until`` holds."""
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            if until is not None:
                wait_for(lambda: until() or process.poll() is not None)
                process.terminate()
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)
