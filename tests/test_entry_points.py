"""Every script explains itself at once; pruning removes what it should."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import SCRIPTS, run_script

OLD_S = 1_000_000_000


NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))


def test_every_script_explains_itself_without_torch(tmp_path: Path) -> None:
    # Help, or the error about a misspelled flag, does not wait for torch.
    code = "import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv.pop(0))\n"
    code += "sys.modules['torch'] = None; runpy.run_path(sys.argv[0], run_name='__main__')"

    def explain(name: str) -> subprocess.CompletedProcess[str]:
        path = str(SCRIPTS / f"{name}.py")
        command = [sys.executable, "-c", code, str(SCRIPTS), path, "--help"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(NAMES, pool.map(explain, NAMES), strict=True):
            assert done.returncode == 0, f"{name}: {done.stderr}"
            assert done.stdout.startswith("usage:") and not done.stderr, name
    assert not list(tmp_path.iterdir())


def write_state(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "0.json").write_text("{}")
    for path in (state / "0.json", state):
        os.utime(path, (OLD_S, OLD_S))


def test_pruning_removes_only_unused_files(tmp_path: Path) -> None:
    published, old = (tmp_path / "state" / "e" / name for name in ("published", "old"))
    shared, orphan = (tmp_path / "state" / ".tokens" / name for name in ("shared", "orphan"))
    for folder in (published, old, shared, orphan):
        write_state(folder)
    (old / "outcome.json").write_text("{}")
    results = tmp_path / "results" / "e"
    results.mkdir(parents=True)
    (results / "training.json").write_text(json.dumps({"fingerprint": "published"}))
    (results / "tokens.ids").hardlink_to(shared / "0.json")

    half = results / ".keep.arrow.1.partial"
    write_state(half)
    listed = run_script("prune_state", "--dry-run", cwd=tmp_path)
    assert listed.stdout.splitlines() == [
        "would remove state/e/old", "would remove state/.tokens/orphan",
        "would remove results/e/.keep.arrow.1.partial",
    ]  # fmt: skip
    assert old.is_dir() and orphan.is_dir()

    done = run_script("prune_state", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert published.is_dir() and shared.is_dir() and not old.exists()
    assert not orphan.exists() and not half.exists()
