"""The chain is declared once: rules, drawings and plans of all experts must match it."""

import re
import shutil
import subprocess
from collections import Counter

import pytest
from support import ROOT
from workflow_space import Workspace

from expertflow.chain import CHAIN, STAGES

DRAWN = re.compile(r"^[ |]*(\w+(?: / \w+)?)( \*|)  +(\S.*)$", re.MULTILINE)


def test_a_stage_comes_after_its_inputs() -> None:
    seen: set[str] = set()
    for stage in CHAIN:
        assert set(stage.reads.split()) <= seen, stage.name
        seen.add(stage.name)


@pytest.mark.chain
def test_stages_read_what_the_rules_read(finished: Workspace) -> None:
    targets = ("index.json", "tiny/bundle.tar")
    tuned = "experts={tiny: {training: {tuned: results/tiny/tuning.json}}}"
    settings = ("--config", "calibrate=true", "ablate=true", tuned)
    output = finished.run(
        "--forceall", "--rulegraph", "dot", *(f"results/{name}" for name in targets), *settings
    )
    nodes = dict(re.findall(r'(\d+)\[label = "(\w+)"', output))
    edges = {(nodes[a], nodes[b]) for a, b in re.findall(r"(\d+) -> (\d+)", output)}
    declared = {(read, stage.name) for stage in CHAIN for read in stage.reads.split()}
    assert edges == {edge for edge in declared if "generate_source" not in edge}


def read_drawing(page: str) -> dict[str, tuple[str, str]]:
    """Return each stage's mark and text in a drawing of the chain."""
    return {
        name: (match[2], match[3])
        for match in DRAWN.finditer((ROOT / page).read_text())
        for name in match[1].split(" / ")
        if name in STAGES
    }


def test_the_drawings_show_the_chain() -> None:
    drawn = read_drawing("Snakefile")
    assert drawn == read_drawing("README.md")
    marks = {name: mark for name, (mark, _) in drawn.items()}
    assert marks == {stage.name: " *" * bool(stage.asked) for stage in CHAIN}
    # Tokens are made beside the documents; each column is in order.
    tokens = ["prepare_tokenizer", "pretokenize_shard"]
    for names in (tokens, [name for name in STAGES if name not in tokens]):
        assert names == [name for name in drawn if name in names]


EXPERTS = {path.stem for path in (ROOT / "config" / "experts").glob("*.yaml")}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("clone") / "c"
    # Compiled files come and go while other tests run.
    ignored = shutil.ignore_patterns(
        "results", "state", ".venv", ".snakemake", ".git", ".*_cache", "__pycache__", ".hypothesis"
    )
    shutil.copytree(ROOT, root, ignore=ignored)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return Workspace(root)


@pytest.mark.chain
def test_the_default_target_makes_every_expert(clone: Workspace) -> None:
    rules = clone.jobs()
    assert rules["build_report"] == rules["train_expert"] == len(EXPERTS) == 8
    assert rules["generate_source"] == 8
    assert rules["compare_experts"] == 1
    bundles = clone.jobs(*(f"results/{expert}/bundle.tar" for expert in EXPERTS))
    assert bundles["make_bundle"] == 8 and not bundles["train_expert"]


@pytest.mark.chain
def test_the_full_preset_is_planned_without_a_network(clone: Workspace) -> None:
    output = clone.run("-n", "--config", "preset=full", HF_HUB_CACHE=str(clone.root / "no-cache"))
    rules = Counter(re.findall(r"^would run  (\w+)", output, re.MULTILINE))
    assert rules["build_report"] == rules["fetch_source"] == 8
    # A token job takes up to 16 document shards.
    assert (rules["prepare_shard"], rules["pretokenize_shard"]) == (68, 10)
    assert "gretelai/synthetic_text_to_sql@main: revision not resolved yet" in output
    lock = (clone.root / "results" / "phase1a" / "sources.lock.json").read_text()
    assert '"n_shards": 32' in lock
