"""Damage is named by the stage that reads it; test_remedies.py does what the line says."""

import pytest
from flipped_bytes import READERS, show_outcomes
from workflow_space import Workspace

pytestmark = pytest.mark.chain
# A file of each kind of stage; ``python tests/workflow/flipped_bytes.py`` tries all.
SHARE = (
    "results/tiny/sources.lock.json",
    "results/tiny/documents/sums/000.arrow",
    "results/tiny/keep.arrow",
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
    assert counts == {"named": 8, "made again": 2}
