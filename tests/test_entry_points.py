"""Every script starts, and the chores of the Makefile do what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, SCRIPTS

MAKEFILE = (ROOT / "Makefile").read_text()
OLD_S = 1_000_000_000


def run_script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_every_script_explains_itself(script: str, tmp_path: Path) -> None:
    done = run_script(script, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:") and not done.stderr
    assert not list(tmp_path.iterdir())


def write_state(state: Path, *, n_files: int = 1) -> None:
    state.mkdir(parents=True)
    for i in range(n_files):
        (state / f"{i}.json").write_text("{}")
    for path in (*state.iterdir(), state):
        os.utime(path, (OLD_S, OLD_S))


def test_pruning_removes_what_no_result_uses_and_nothing_else(tmp_path: Path) -> None:
    published, old = (tmp_path / "state" / "e" / name for name in ("published", "old"))
    shared, orphan = (tmp_path / "state" / ".tokens" / name for name in ("shared", "orphan"))
    for folder in (published, old, shared, orphan):
        write_state(folder)
    (old / "outcome.json").write_text("{}")
    results = tmp_path / "results" / "e"
    results.mkdir(parents=True)
    (results / "training.json").write_text(json.dumps({"fingerprint": "published"}))
    (results / "tokens.ids").hardlink_to(shared / "0.json")

    listed = run_script("prune_state.py", "--dry-run", cwd=tmp_path)
    assert listed.stdout.splitlines() == [
        "would remove state/e/old", "would remove state/.tokens/orphan",
    ]  # fmt: skip
    assert old.is_dir() and orphan.is_dir()

    done = run_script("prune_state.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert published.is_dir() and shared.is_dir() and not old.exists() and not orphan.exists()


def targets() -> list[str]:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert phony
    return phony[1].split()


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The flags of the make that runs these tests are not meant for this one.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    command = ["make", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", targets())
def test_every_target_is_listed_and_can_be_made(target: str) -> None:
    assert re.search(rf"^make {target}\s", run_make("-s", "help").stdout, re.M), "not in make help"
    done = run_make("-n", target)
    assert done.returncode == 0, done.stderr
    # What its commands name in this project must be there.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("rm ")]
    for path in re.findall(r"\b((?:workflow|tests|envs)/[\w./-]+)", "\n".join(lines)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("target", ["verify", "prune"])
def test_looking_after_results_needs_no_results(target: str, tmp_path: Path) -> None:
    lines = re.findall(rf"^{target}: install\n\t\$\(BIN\)/python (\S+)$", MAKEFILE, re.M)
    assert len(lines) == 1
    done = subprocess.run(
        [sys.executable, str(ROOT / lines[0])], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
