import sys
from argparse import Namespace
from pathlib import Path

from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import monitor_overhead


def test_a_training_is_compared_with_and_without_the_monitor(tmp_path: Path) -> None:
    args = Namespace(pairs=2, seconds=0.1, interval=0.02)
    result = monitor_overhead.training(tmp_path, args)
    assert result["n_pairs"] == 2
    assert result["step_wall_slowdown"] > -1 and result["monitor_share_of_a_core"] >= 0
