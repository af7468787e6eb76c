"""The bundle of every shipped demo: opened on another machine, and its outcome taken home."""

import json
from pathlib import Path

import pytest
from bundle_boxes import GPU_WORK, Box
from support import ROOT
from workflow_space import CODE, copy_code

from expertflow.core.files import sha256_file

pytestmark = pytest.mark.chain
DEMOS = sorted(path.stem for path in (ROOT / "config" / "experts").glob("*.yaml"))
FEW = {demo: {"evaluation": {"max_examples": 4, "n_selection_examples": 4}} for demo in DEMOS}
# Settings that came with the bundle count on the box, too; at home they have to be given again.
SHORT = ("--config", "training={max_steps: 2, logging_steps: 1}", f"experts={json.dumps(FEW)}")
REPORTS = [f"results/{demo}/report.json" for demo in DEMOS]


def clone(root: Path) -> Box:
    root.mkdir()
    for name in CODE:
        copy_code(ROOT / name, root / name)
    (root / "home").mkdir()
    return Box(root)


def test_every_demo_trains_from_its_bundle_and_its_outcome_lands(tmp_path: Path) -> None:
    home, box = clone(tmp_path / "home"), clone(tmp_path / "box")
    home.run(*(f"results/{demo}/bundle.tar" for demo in DEMOS), *SHORT)
    locks = [Path("results", demo, "sources.lock.json") for demo in DEMOS]
    hashes = [sha256_file(home.root / lock) for lock in locks]
    for demo in DEMOS:
        box.open(home.root / "results" / demo / "bundle.tar")
    assert box.jobs(*REPORTS) == dict.fromkeys(GPU_WORK, len(DEMOS))
    assert [sha256_file(box.root / lock) for lock in locks] == hashes
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    box.run(*REPORTS, "--config", f"scratch={scratch}")
    for demo in DEMOS:
        done = box.script("make_outcome", demo, "--output", f"{demo}.tar")
        assert done.returncode == 0, done.stderr
        home.open(box.root / f"{demo}.tar", "--outcome")
    assert not home.jobs(*REPORTS, *SHORT)
    assert [sha256_file(home.root / lock) for lock in locks] == hashes
    assert "CHANGED" not in home.script("verify_results").stdout
