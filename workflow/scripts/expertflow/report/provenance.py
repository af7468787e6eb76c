"""Say what a report was made from: code, inputs, machine. Nothing here decides a result."""

import getpass
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

from expertflow.core.files import sha256_file

ROOT = Path(__file__).resolve().parents[4]
LOCKFILE = ROOT / "envs" / "requirements.lock"
RECORDS = (
    "sources.lock.json",
    "datasets.json",
    "documents.json",
    "model.json",
    "packing.json",
    "plan.json",
    "training.json",
    "evaluation.json",
    "export.json",
)


def collect_provenance(results: Path) -> dict[str, Any]:
    """Hash the records in ``results`` and describe code and host; null where something is unknown.

    The host's name is hashed: it tells two machines apart and names neither.
    """
    host = f"{getpass.getuser()}@{platform.node()}"
    found = [name for name in RECORDS if (results / name).is_file()]
    return {
        "git": _git_commit(),
        "lockfile_sha256": sha256_file(LOCKFILE) if LOCKFILE.is_file() else None,
        "input_sha256": {name: sha256_file(results / name) for name in found},
        "command": f"snakemake --cores all {results}/report.json",
        "host_hash": hashlib.sha256(host.encode()).hexdigest()[:12],
    }


def _git_commit() -> str | None:
    """Give the commit of the code, marked when it has local changes; null outside a clone."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
