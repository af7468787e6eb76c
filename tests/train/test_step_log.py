"""The log of steps, where a run goes on from an earlier one."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertflow.train.step_hooks import STEPS_FILE, truncate_log


def resumed(state: Path, *, step: int) -> Any:
    return SimpleNamespace(
        state=state,
        plan=SimpleNamespace(track_per_step_metrics=True),
        processes=SimpleNamespace(is_first=True),
        progress=SimpleNamespace(step=step),
    )


@pytest.mark.parametrize(
    ("step", "kept", "n_lost"), [(2, [1, 2], 0), (3, [1, 2, 3], 0), (5, [1, 2, 3], 2)]
)
def test_steps_after_the_checkpoint_go_and_lost_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, kept: list[int], n_lost: int
) -> None:
    lines = "".join(json.dumps({"step": n}) + "\n" for n in (1, 2, 3))
    (tmp_path / STEPS_FILE).write_text(lines + '{"step": 4')
    with caplog.at_level(logging.WARNING):
        truncate_log(resumed(tmp_path, step=step))
    left = [json.loads(line)["step"] for line in (tmp_path / STEPS_FILE).read_text().splitlines()]
    assert left == kept
    assert [f"{n_lost} steps are missing" in r.message for r in caplog.records] == [True] * (
        n_lost > 0
    )
