"""A copy of the workflow with two tiny experts, run once; tests edit copies of it."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from filelock import FileLock
from support import ROOT
from warm_python import unmeasured, warm_jobs, warm_python

from expertflow.core.records import Record
from expertflow.data.layout import CHATML

CODE = ("workflow", "profiles", "envs", "config")
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
REPORT = "results/tiny/report.json"
# A job of a dry run: in our words, or in Snakemake's if a profile has no logger.
RULE = re.compile(r"^(?:would run  |rule |localrule )(\w+)", re.MULTILINE)
# A complete chain takes a minute; this is for hangs, also on a slow machine.
LIMIT_S = 1200
MANIFEST = """
description: Adds two small numbers.
model: builtin:tiny-qwen3
builtin: {vocab_size: 300, hidden_size: 32, intermediate_size: 64, head_dim: 8}
sources:
  - {name: sums, kind: local, path: data/sums.jsonl, license: CC0-1.0,
     prompt: "{question}", completion: "{answer}"}
data:
  eval_fraction: 0.1
  chat_template: data/chat.jinja
  benchmarks: [{path: data/benchmark.jsonl, text: "{question}"}]
training:
  {method: full, batch_size: 4, max_seq_length: 64, max_steps: 6, learning_rate: 0.001,
   n_threads: 1}
evaluation: {task: exact_match, max_examples: 4, max_new_tokens: 4}
"""


def readme_manifest() -> str:
    """Return the manifest that the README tells its reader to write."""
    [text] = re.findall(
        r"^ *```yaml\n(.*?)^ *```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return textwrap.dedent(text)


def manifest(**training: Any) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(MANIFEST)
    value["training"] |= training
    return value


class Workspace(Record, frozen=True):
    root: Path

    def snakemake(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Snakemake and its jobs as forks of the warm process."""
        forked = {**warm_jobs(), **environment}
        return self.execute(warm_python() / "snakemake", "--cores", "2", *arguments, **forked)

    def environment(self, changes: dict[str, str]) -> dict[str, str]:
        # The output comes from this checkout's plugin, not the last installed one.
        inherited = unmeasured() if (self.root / "Snakefile").exists() else os.environ
        return {**inherited, "PYTHONPATH": str(ROOT / "workflow" / "logger"), **changes}

    def script(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.execute(warm_python() / "python", f"workflow/scripts/{name}.py", *arguments)

    def execute(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, command)],
            cwd=self.root, env=self.environment(environment), capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip

    def start(self, *command: object) -> "subprocess.Popen[str]":
        """Start a command in a separate session, with warm jobs; its stdout is all its output."""
        pipe, output = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            [*map(str, command)],
            cwd=self.root, env=unmeasured() | warm_jobs(), stdout=pipe, stderr=output, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, **environment: str) -> str:
        """Run Snakemake, which must succeed; return its output."""
        done = self.snakemake(*arguments, **environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        return done.stdout + done.stderr

    def refused(self, *arguments: str, **environment: str) -> str:
        """Run Snakemake, which must fail with one line, its last; return it."""
        done = self.snakemake(*(arguments or (REPORT,)), **environment)
        told = done.stderr.splitlines()
        lines = [line for line in told if line.startswith("error: ")]
        assert done.returncode != 0 and lines == told[-1:], done.stderr
        assert "Traceback" not in done.stderr
        return lines[0]

    def jobs(self, *arguments: str, **environment: str) -> Counter[str]:
        listed = self.run("-n", *arguments, **environment)
        rules = Counter(RULE.findall(listed))
        assert rules or "Nothing to be done" in listed
        return rules

    def planned(self, *arguments: str) -> set[str]:
        return set(self.jobs(REPORT, *arguments))

    def record(self, name: str) -> Any:
        return json.loads((self.root / "results" / "tiny" / name).read_text())

    def write_manifest(self, name: str, value: dict[str, Any]) -> None:
        path = self.root / "config" / "experts" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(value))

    def write_data(self, *, first: str = "1 plus 1") -> None:
        data = self.root / "data"
        sums = {f"what is {a} plus {b}": a + b for a in range(9) for b in range(9)}
        write_jsonl(data / "sums.jsonl", {first: 2, **sums})
        write_jsonl(data / "benchmark.jsonl", {"something that is asked nowhere else": 0})
        (data / "chat.jinja").write_text(CHATML)

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.root / path
        text = file.read_text()
        assert old in text, f"{path} does not hold {old!r}"
        file.write_text(text.replace(old, new, 1))

    def copy(self, target: Path) -> Self:
        shutil.copytree(self.root, target, symlinks=True)
        return type(self)(target)


def write_jsonl(path: Path, answers: dict[str, int]) -> None:
    records = [{"question": text, "answer": str(number)} for text, number in answers.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def let_trainings_rest(space: Workspace) -> None:
    """Make trainings pause after a save while their folder has ``rest-0``, unless stopped.

    Steps take milliseconds: without a pause, a training may finish before a test on a busy machine
    sees its checkpoint and stops it. With ``rest-20`` they pause from step 20 on.
    """
    space.edit(
        "workflow/scripts/expertflow/train/step_hooks.py",
        "        save_checkpoint(run)\n    if told",
        """        save_checkpoint(run)
        run.saver.wait()
        from pathlib import Path
        while not (told or run.is_over or run.stop()):
            if not [p for p in Path().glob("rest-*") if int(p.name[5:]) <= progress.step]:
                break
            time.sleep(0.01)
    if told""",
    )


def copy_code(source: Path, target: Path) -> None:
    """Copy the files that the workflow needs, without data or results."""
    ignored = shutil.ignore_patterns("*.pyc.*")  # being written by another process
    for name in CODE:
        shutil.copytree(source / name, target / name, ignore=ignored)
    shutil.copy2(source / "Snakefile", target)


def make_workspace(root: Path) -> Workspace:
    copy_code(ROOT, root)
    space = Workspace(root)
    space.write_data()
    space.write_manifest("tiny", manifest())
    space.write_manifest("other", manifest())
    config = {"hardware": "cpu", "experts": {"tiny": {}, "other": {}}}
    (root / "config" / "config.yaml").write_text(yaml.safe_dump(config))
    return space


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a finished run. One worker makes it; each reads its own copy."""
    shared = tmp_path_factory.getbasetemp().parent / "finished"  # for all workers of this session
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shared = tmp_path_factory.mktemp("finished")
    shared.mkdir(exist_ok=True)
    with FileLock(shared / "lock"):
        if not (shared / "done").exists():
            shutil.rmtree(shared / "a space", ignore_errors=True)
            # It and its jobs start like users', so that a missing import shows.
            done = make_workspace(shared / "a space").execute(SNAKEMAKE, "--cores", "2", REPORT)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
            (shared / "done").touch()
    return Workspace(shared / "a space").copy(tmp_path_factory.mktemp("own") / "a space")


@pytest.fixture
def space(finished: Workspace, tmp_path: Path) -> Workspace:
    return finished.copy(tmp_path / "space")
