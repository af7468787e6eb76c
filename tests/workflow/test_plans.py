"""Dry runs of what is shipped: all eight experts, both presets, from a clean clone."""

import re
import shutil
import subprocess
from collections import Counter

import pytest
from support import ROOT
from workflow_space import Workspace

pytestmark = pytest.mark.chain
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


def test_the_default_target_makes_every_expert(clone: Workspace) -> None:
    rules = clone.jobs()
    assert rules["build_report"] == rules["train_expert"] == len(EXPERTS) == 8
    assert rules["generate_source"] == 8
    assert rules["compare_experts"] == 1
    bundles = clone.jobs(*(f"results/{expert}/bundle.tar" for expert in EXPERTS))
    assert bundles["make_bundle"] == 8 and not bundles["train_expert"]


def test_the_full_preset_is_planned_without_a_network(clone: Workspace) -> None:
    said = clone.run("-n", "--config", "preset=full", HF_HUB_CACHE=str(clone.root / "no-cache"))
    rules = Counter(re.findall(r"^rule (\w+):", said, re.MULTILINE))
    assert rules["build_report"] == rules["fetch_source"] == 8
    # A token job takes up to 16 document shards.
    assert (rules["prepare_shard"], rules["pretokenize_shard"]) == (68, 10)
    assert "gretelai/synthetic_text_to_sql@main: revision not resolved yet" in said
    lock = (clone.root / "results" / "phase1a" / "sources.lock.json").read_text()
    assert '"n_shards": 32' in lock
