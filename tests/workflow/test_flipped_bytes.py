"""Damage is named by the stage that reads it, and what the line says makes the file again."""

import pytest
from flipped_bytes import READERS, flip, show_outcomes
from workflow_space import Workspace

pytestmark = pytest.mark.chain
# A file of each kind of stage; ``python tests/workflow/flipped_bytes.py`` tries all.
SHARE = (
    "results/tiny/sources.lock.json",
    "results/tiny/documents/sums/000.arrow",
    "results/tiny/tokenizer/tokenizer.json",
    "results/tiny/base_model/model.safetensors",
    "results/tiny/tokens/sums/.000.json.fingerprint",
    "results/tiny/packed/train/data-00000-of-00001.arrow",
    "results/tiny/checkpoint/model.safetensors",
    "results/tiny/merged/README.md",
    "state/.tokens/*/tokens.ids",
)


def test_no_flipped_byte_is_used(space: Workspace) -> None:
    counts = show_outcomes(space, {pattern: READERS[pattern] for pattern in SHARE})
    assert counts == {"named": 7, "made again": 2}


def test_what_the_line_says_makes_a_damaged_file_again(space: Workspace) -> None:
    target, keep = "results/tiny/packing.json", space.root / "results" / "tiny" / "keep.arrow"
    intact = keep.read_bytes()
    flip(keep)
    (space.root / target).unlink()
    failed = space.snakemake(target)
    line = "error: results/tiny/keep.arrow: is not what results/tiny/documents.json says; run make"
    assert failed.returncode == 1 and line in failed.stderr
    assert "removed results/tiny/keep.arrow" in space.script("repair_results").stdout
    space.run(target)
    assert keep.read_bytes() == intact
