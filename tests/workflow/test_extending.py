"""The recipes of docs/extending.md are followed to the letter, in a copy of the project."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT
from warm_python import warm_jobs
from workflow_space import LIMIT_S, Workspace

pytestmark = [pytest.mark.chain, pytest.mark.long]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
_, *PARTS = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
RECIPES = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
# A place and the block below it: `path`, new | before `line` | in place of `line`.
BLOCK = re.compile(
    r"^`([^`]+)`, (new|before|in place of)(?: `([^`]+)`)?:\n\n```\w+\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def apply(space: Workspace, recipe: str) -> None:
    for path, how, line, text in BLOCK.findall(recipe):
        file = space.root / path
        if how == "new":
            assert not file.exists(), path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            continue
        anchor = line.replace("\\n", "\n")
        before = file.read_text(encoding="utf-8")
        assert before.count(anchor) == 1, f"{path}: {line}"
        new = text.rstrip("\n") if how == "in place of" else text + anchor
        file.write_text(before.replace(anchor, new), encoding="utf-8")


def setting_is_used(space: Workspace) -> bool:
    report, last = space.record("report.json"), (space.root / "results/tiny/steps.jsonl")
    rate = json.loads(last.read_text().splitlines()[-1])["learning_rate"]
    ratio = report["training_parameters"]["min_lr_ratio"]
    return bool(ratio == 0.1 and rate > 0.1 * 1e-3)


def figure_is_shown(space: Workspace) -> bool:
    n = space.record("report.json")["training_report"]["training"]["n_interop_threads"]
    return n >= 1 and "operations at once" in (space.root / "results/tiny/report.html").read_text()


def stage_counts(space: Workspace) -> bool:
    n = space.record("documents.json")["n_train_copies"]
    assert space.planned() == {"build_report"}
    return bool(space.record("count.json") == {"expert": "tiny", "n": n})


CHECKS: dict[str, Callable[[Workspace], bool]] = {
    "A training setting": setting_is_used,
    "An optimizer, a schedule": lambda s: s.record("plan.json")["optim"] == "sgd",
    "A scoring task": lambda s: (
        s.record("evaluation.json")["after"]["score"]["metric"] == "begins_with"
    ),
    "A source kind": lambda s: (s.root / "results/shop/packing.json").is_file(),
    "A measured figure": figure_is_shown,
    "A finding": lambda s: "one-source" in {f["code"] for f in s.record("report.json")["findings"]},
    "A stage": stage_counts,
}


def test_every_recipe_is_followed() -> None:
    assert list(RECIPES) == list(CHECKS)


# All of these end with a report; it is made once, by the first one's command.
TOGETHER = ("A training setting", "A measured figure", "A finding")
ALONE = [(name,) for name in CHECKS if name not in TOGETHER]


@pytest.mark.parametrize("names", [TOGETHER, *ALONE], ids=" and ".join)
def test_a_recipe_works_as_written(space: Workspace, names: tuple[str, ...]) -> None:
    (space.root / "docs").mkdir()
    for name in names:
        apply(space, RECIPES[name])
    (commands,) = COMMANDS.findall(RECIPES[names[0]])
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, **warm_jobs()}
    # The smallest expert replaces the page's.
    done = subprocess.run(
        ["bash", "-euc", commands.replace("expert-sql", "tiny")],
        cwd=space.root, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert all(CHECKS[name](space) for name in names)
