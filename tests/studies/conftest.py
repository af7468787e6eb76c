from pathlib import Path

import pytest
from support import LORA, write_tiny_run

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_run(folder, lora=LORA, n_steps=8)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainPlan:
    folder = tmp_path_factory.mktemp("full")
    write_tiny_run(folder)
    return read_record(TrainPlan, folder / "plan.json")
