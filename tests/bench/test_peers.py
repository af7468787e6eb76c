"""The comparison with peers: turns and ratios, what is refused and fails, what Snakemake costs."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "peers"))

from measured import Failed
from orchestration import Copies
from side_by_side import finish_report, run_parts
from turns import ratios, turns


def test_a_machine_that_slows_down_changes_no_ratio_of_equals() -> None:
    speed: dict[str, dict[int, float]] = {"ours": {}, "peer": {}}
    for i, (repeat, line) in enumerate(turns(("ours", "peer"), 4)):
        speed[line][repeat] = 100.0 * 0.9**i
    found = ratios(speed["ours"], speed["peer"])
    assert found is not None
    assert found.median == pytest.approx(1, abs=0.01)
    assert (found.least, found.most) == pytest.approx((0.9, 1 / 0.9))
    # Repeats that one side lacks are left out.
    found = ratios({0: 6.0, 1: 8.0, 2: 9.0}, {0: 3.0, 2: 3.0})
    assert found is not None
    assert (found.median, found.n) == (2.5, 2)
    assert ratios({0: 1.0}, {1: 1.0}) is None


def test_a_part_that_fails_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def breaks(_: Namespace) -> dict[str, Any]:
        raise Failed("our_steps ended with 1:\nno room")

    parts = {"first": breaks, "second": lambda _: {"value": 1}}
    results = run_parts(["first", "second"], parts, Namespace())
    failed = {"failed": "our_steps ended with 1: no room"}
    assert results == {"first": failed, "second": {"value": 1}}
    assert finish_report({"parts": results}, tmp_path / "result.json") == 1
    out = capsys.readouterr().out.splitlines()
    assert "first: failed: our_steps ended with 1: no room" in out
    assert json.loads(out[-1]) == json.loads((tmp_path / "result.json").read_text())


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "a b", "results/x/packing.json")


def test_rows_are_compared_too_and_nothing_is_no_comparison(copies: Copies) -> None:
    with pytest.raises(Failed, match="no result to compare"):
        copies.list_compared_results()
    for name in ("flow", "scripts"):
        rows = copies.folder / name / "results" / "x" / "packed" / "train" / "data.arrow"
        rows.parent.mkdir(parents=True)
        rows.write_bytes(b"rows")
    assert copies.list_compared_results() == ["packed/train/data.arrow"]
    rows.write_bytes(b"others")
    with pytest.raises(Failed, match="different results"):
        copies.list_compared_results()
