"""Build the virtual environments of the peers, one per requirements file, and remember them.

An environment is built once per content of its file. A failed installation is recorded with pip's
reason and retried only when the file changes or its folder is deleted. ``installed.txt`` of each
environment lists its packages. torch is installed first and pinned; if pip would download its CUDA
build, set PIP_EXTRA_INDEX_URL to an index of CPU builds.
"""

import hashlib
import json
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
# By the benchmark's name of each peer: its program, and the environment it runs in.
PEERS = {
    "source_method": ("source_method.py", "datasets"),
    "trl": ("trl_bfd.py", "trl"),
    "datatrove": ("datatrove_tokens.py", "datatrove"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A virtual environment, or why it is missing."""

    name: str
    python: Path
    problem: str | None


def environment(name: str, directory: Path) -> Environment:
    """Return an environment; build it if there is none for the file's current content."""
    requirements = REQUIREMENTS / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = directory.absolute() / name
    python, stamp = folder / "bin" / "python", folder / "built.json"
    known = json.loads(stamp.read_text()) if stamp.is_file() else {}
    if known.get("sha256") != digest:
        venv.create(folder, clear=True, with_pip=True)
        problem = install(python, requirements)
        if problem is None:
            (folder / "installed.txt").write_text(pip(python, "freeze").stdout)
        known = {"sha256": digest, "problem": problem}
        stamp.write_text(json.dumps(known))
    return Environment(name=name, python=python, problem=known["problem"])


def install(python: Path, requirements: Path) -> str | None:
    """Install a requirements file; return pip's reason if that fails."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    first = [line for line in lines if line.startswith("torch==")]
    for step in [first] if first else []:
        if problem := reason(pip(python, "install", *step)):
            return problem
    return reason(pip(python, "install", "--requirement", str(requirements)))


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def reason(done: subprocess.CompletedProcess[str]) -> str | None:
    """Return the last error line of a failed pip."""
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (lines or done.stderr.splitlines() or [f"pip ended with {done.returncode}"])[-1]


def versions(built: Environment) -> dict[str, str]:
    """Return the installed versions of the packages in an environment's file."""
    named = (REQUIREMENTS / f"{built.name}.txt").read_text(encoding="utf-8").lower().split("==")
    path = built.python.parents[1] / "installed.txt"
    pairs = (line.partition("==") for line in path.read_text().splitlines() if "==" in line)
    return {n: version for n, _, version in pairs if any(n.lower() in word for word in named)}
