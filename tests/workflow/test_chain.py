"""The chain is declared once: rules and drawings are held against it."""

import re

import pytest
from support import ROOT
from workflow_space import Workspace

from expertflow.chain import CHAIN, STAGES

DRAWN = re.compile(r"^[ |]*(\w+(?: / \w+)?)( \*|)  +(\S.*)$", re.MULTILINE)


def test_a_stage_stands_after_all_that_it_reads() -> None:
    seen: set[str] = set()
    for stage in CHAIN:
        assert set(stage.reads.split()) <= seen, stage.name
        seen.add(stage.name)


@pytest.mark.chain
def test_stages_read_what_the_rules_read(finished: Workspace) -> None:
    targets = ("index.json", "tiny/bundle.tar")
    tuned = "experts={tiny: {training: {tuned: results/tiny/tuning.json}}}"
    settings = ("--config", "calibrate=true", "ablate=true", tuned)
    said = finished.run(
        "--forceall", "--rulegraph", "dot", *(f"results/{name}" for name in targets), *settings
    )
    nodes = dict(re.findall(r'(\d+)\[label = "(\w+)"', said))
    edges = {(nodes[a], nodes[b]) for a, b in re.findall(r"(\d+) -> (\d+)", said)}
    declared = {(read, stage.name) for stage in CHAIN for read in stage.reads.split()}
    assert edges == {edge for edge in declared if "generate_source" not in edge}


def read_drawing(page: str) -> dict[str, tuple[str, str]]:
    """Return what a drawing of the chain shows of each stage: its mark and its text."""
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
    for side in ("documents", "tokens", ""):
        names = [stage.name for stage in CHAIN if stage.side == side]
        assert names == [name for name in drawn if name in names]
