"""What a training asks of a cluster, and what is refused before anything is submitted."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_forecast import COST

from expertflow.config.attach import _before_first_job
from expertflow.config.machine import count_nodes, runtime_minutes
from expertflow.core.errors import ConfigError
from expertflow.plan.settings import TrainingSection

DAY = 24 * 60


def test_a_cluster_is_asked_for_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runtime_minutes("e") == DAY
    path = Path("results/e/plan.json")
    path.parent.mkdir(parents=True)
    for plan, minutes in (
        # Half as long again as the plan's upper end, and an hour.
        (json.dumps({"cost": {**COST, "predicted_hours_high": 10.0}}), 60 + 15 * 60),
        (json.dumps({"cost": {**COST, "predicted_hours_high": None}}), DAY),
        ("\0" * 9, DAY),
    ):
        path.write_text(plan)
        assert runtime_minutes("e") == minutes


def test_one_machine_asks_for_none_and_several_for_as_many() -> None:
    assert count_nodes(TrainingSection(world_size=4, n_nodes=1)) is None
    assert count_nodes(TrainingSection(world_size=4, n_nodes=2)) == 2
    said = r"n_nodes is 2 and training\.world_size 3: .* a multiple of 2"
    with pytest.raises(ConfigError, match=said):
        count_nodes(TrainingSection(world_size=3, n_nodes=2))


def test_slurm_without_sbatch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run: Any = SimpleNamespace(
        execution_settings=SimpleNamespace(keep_incomplete=False),
        executor_plugin=SimpleNamespace(name="slurm"),
    )
    said = "sbatch, which is not found here; run Snakemake on a login"
    with pytest.raises(SystemExit, match=said):
        _before_first_job(run)
