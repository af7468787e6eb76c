"""As a module of another Snakefile, the workflow behaves as in any other run."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from snakemake.resources import Resources  # type: ignore[import-untyped]
from support import wait_for
from workflow_space import REPORT, SNAKEMAKE, Workspace, make_workspace

from expertflow.config.attach import add_forecasts

pytestmark = pytest.mark.chain
SNAKEFILE = """
module ef:
    snakefile: "{code}/Snakefile"
    config: config

use rule * from ef as ef_*

onstart:
    print("our own start")

rule copy_report:
    input: "results/tiny/report.json"
    output: "copy.json"
    shell: "while [ ! -e go ]; do sleep 0.1; done; cp {{input}} {{output}}"
"""
# The settings of profiles/default, which Snakemake does not find next to another Snakefile.
LIMITS = ("--nolock", "--rerun-incomplete", "--resources", "gpu=1")


@pytest.fixture
def mine(tmp_path: Path) -> Workspace:
    """Return a folder with a Snakefile, data and a configuration; the code is in another folder."""
    code, mine = make_workspace(tmp_path / "code"), Workspace(tmp_path / "mine")
    mine.write_data()
    (mine.root / "Snakefile").write_text(SNAKEFILE.format(code=code.root))
    (mine.root / "mine.yaml").write_text(
        yaml.safe_dump({"hardware": "cpu", "experts": {"tiny": {}}})
    )
    return mine


def test_two_runs_at_once(mine: Workspace, finished: Workspace) -> None:
    """Results made elsewhere are adopted; the first run pauses in its own last job."""
    shutil.copytree(finished.root / "results", mine.root / "results")
    (mine.root / REPORT).unlink()
    arguments = ("copy.json", "--configfile", "mine.yaml", *LIMITS)
    assert set(mine.jobs(*arguments)) == {"ef_build_report", "copy_report"}
    first = mine.start(SNAKEMAKE, "--cores", "2", *arguments)
    wait_for((mine.root / REPORT).exists, during=first)
    line = mine.refused(*arguments, "--forcerun", "ef_build_report")
    assert f"tiny is being made by another run, process {first.pid} on " in line
    (mine.root / "go").touch()
    output, _ = first.communicate()
    assert first.returncode == 0, output
    assert "our own start" in output and "held-out loss" in output
    assert (mine.root / "copy.json").read_bytes() == (mine.root / REPORT).read_bytes()
    assert "Nothing to be done" in mine.run("-n", *arguments)


def test_impossible_runs_are_rejected(mine: Workspace) -> None:
    assert "resource gpu is not limited" in mine.refused(REPORT)
    assert "train_expert" in mine.run("-n", REPORT)
    assert "--no-hooks would disable the lock" in mine.refused(REPORT, "--no-hooks", *LIMITS)
    wide = ("--config", "training={world_size: 2}")
    assert "training.world_size is 2" in mine.refused(REPORT, *LIMITS, *wide)
    mine.edit("Snakefile", "    config: config", '    config: config\n    prefix: "x"')
    assert "take no prefix" in mine.refused(REPORT, *LIMITS)


def test_unset_keys_have_the_shipped_values(mine: Workspace) -> None:
    mine.edit("Snakefile", " as ef_*", "")
    rules = mine.jobs("results/index.html", *LIMITS)
    assert rules["build_report"] == 2 and rules["compare_experts"] == 1


def test_forecasts_are_added_to_own_rules_once() -> None:
    def rule(script: str, wildcard: str = "expert", **resources: str) -> Any:
        return SimpleNamespace(
            shellcmd=f'exec python "$EXPERTFLOW"/{script}.py',
            wildcard_names={wildcard},
            resources=Resources.from_mapping(resources),
        )

    rules = [
        rule("pack_sequences"),
        rule("pack_sequences", forecast="of another module"),
        rule("pack_sequences", "sample"),
        rule("push_expert"),
        SimpleNamespace(shellcmd=None),
    ]
    wf: Any = SimpleNamespace(forecast=lambda stage: f"of {stage}")
    add_forecasts(SimpleNamespace(rules=rules), wf)
    found = [one.resources["forecast"].raw for one in rules[:2]]
    assert found == ["of pack_sequences", "of another module"]
    assert not any("forecast" in one.resources for one in rules[2:4])
