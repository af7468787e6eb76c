"""Turns and ratios: a machine that becomes slower must not make one side look bad."""

import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench" / "peers"))

from turns import ratios, turns


def test_every_other_repeat_runs_the_other_way_round() -> None:
    order = turns(("ours", "peer"), 4)
    assert [line for _, line in order] == ["ours", "peer", "peer", "ours"] * 2
    assert [repeat for repeat, _ in order] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_machine_that_slows_down_changes_no_ratio_of_equals() -> None:
    order = turns(("ours", "peer"), 4)
    speed: dict[str, dict[int, float]] = {"ours": {}, "peer": {}}
    for i, (repeat, line) in enumerate(order):
        speed[line][repeat] = 100.0 * 0.9**i
    found = ratios(speed["ours"], speed["peer"])
    assert found is not None
    assert found.median == pytest.approx(1, abs=0.01)
    assert (found.least, found.most) == pytest.approx((0.9, 1 / 0.9))


def test_repeats_that_one_side_lacks_are_left_out() -> None:
    found = ratios({0: 6.0, 1: 8.0, 2: 9.0}, {0: 3.0, 2: 3.0})
    assert found is not None
    assert (found.median, found.n) == (2.5, 2)
    assert ratios({0: 1.0}, {1: 1.0}) is None
