"""Build the virtual environments of the peers, one per requirements file, and remember them.

An environment is built once per content of its file. A failed installation is recorded with pip's
reason and retried only when the file changes or its folder is deleted. If pip would download
torch's CUDA build, set PIP_EXTRA_INDEX_URL to an index of CPU builds.
"""

import hashlib
import json
import re
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path

from measured import Failed

REQUIREMENTS = Path(__file__).parent / "requirements"
KEPT = Path.home() / ".cache" / "expertflow" / "peers"


def build_environment(name: str, directory: Path) -> tuple[Path, str | None]:
    """Return an environment's Python, and why it is missing, if so.

    It is built if there is none for the file's current content.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = directory.absolute() / name
    python, stamp = folder / "bin" / "python", folder / "built.json"
    known = json.loads(stamp.read_text()) if stamp.is_file() else {}
    if known.get("sha256") != digest:
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "--quiet", "install", "-r", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        reason = (errors or [f"pip ended with {done.returncode}"])[-1]
        known = {"sha256": digest, "problem": reason if done.returncode else None}
        stamp.write_text(json.dumps(known))
    return python, known["problem"]


def list_requirements(name: str) -> list[str]:
    """Return the packages in an environment's file."""
    return re.findall(r"^[\w-]+", (REQUIREMENTS / f"{name}.txt").read_text("utf-8"), re.MULTILINE)


def installed_versions(
    python: Path, packages: Iterable[str], needed: str = "json"
) -> dict[str, str]:
    """Return a Python's versions of packages.

    Raises:
        Failed: it cannot be run, or not import the ``needed`` modules, among them json.
    """
    code = (
        f"import {needed}, importlib.metadata as m; print(json.dumps("
        f"{{d.name: d.version for n in {list(packages)!r} for d in m.distributions(name=n)}}))"
    )
    try:
        done = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise Failed(f"{python} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise Failed(f"{python}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions
