"""What a training asks of a cluster, and what is refused before anything is submitted."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertflow.config import allocation
from expertflow.core.errors import ConfigError
from expertflow.plan.settings import TrainingSection

COST = {
    "price_usd_per_hour": None, "price_as_of": None, "predicted_hours": 8.0,
    "predicted_hours_low": 4.0, "predicted_hours_high": 10.0, "predicted_usd": None,
    "predicted_usd_low": None, "predicted_usd_high": None, "reason": "a prior",
}  # fmt: skip
NO_HOURS = {key: None for key in COST if "hours" in key}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("results/e/plan.json")
    path.parent.mkdir(parents=True)
    return path


def test_half_as_long_again_as_the_plans_upper_end_and_an_hour(plan: Path) -> None:
    plan.write_text(json.dumps({"cost": COST}))
    assert allocation.runtime_minutes("e") == 60 + 15 * 60


@pytest.mark.parametrize("cost", [None, {**COST, **NO_HOURS}])
def test_a_day_where_the_plan_does_not_say(plan: Path, cost: dict[str, object] | None) -> None:
    if cost is not None:
        plan.write_text(json.dumps({"cost": cost}))
    assert allocation.runtime_minutes("e") == 24 * 60


def test_one_machine_asks_for_none_and_several_for_as_many() -> None:
    assert allocation.n_nodes(TrainingSection(world_size=4, n_nodes=1)) is None
    assert allocation.n_nodes(TrainingSection(world_size=4, n_nodes=2)) == 2


def test_a_spoilt_plan_is_no_plan(plan: Path) -> None:
    plan.write_bytes(bytes(9))
    assert allocation.runtime_minutes("e") == 24 * 60


@pytest.mark.parametrize("limit", [8, None])
def test_a_training_asks_for_a_card_a_process(limit: int | None) -> None:
    held = None if limit is None else SimpleNamespace(value=limit)
    assert allocation.n_gpus(TrainingSection(world_size=8), held) == 8


def test_fewer_cards_than_processes_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"world_size is 8, .* 4 at once: .* --resources gpu=8"):
        allocation.n_gpus(TrainingSection(world_size=8), SimpleNamespace(value=4))


def test_machines_with_unlike_shares_are_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"n_nodes is 2 and training\.world_size 3: .* a multiple of 2"
    ):
        allocation.n_nodes(TrainingSection(world_size=3, n_nodes=2))


def test_slurm_without_sbatch_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    allocation.refuse_missing_slurm("local")
    with pytest.raises(
        SystemExit, match="sbatch, which is not found here; run Snakemake on a login"
    ):
        allocation.refuse_missing_slurm("slurm")
