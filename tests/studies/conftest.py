"""Fixtures for tests of studies: two read-only tiny runs."""

from pathlib import Path

import pytest
from support import write_tiny_run

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_run(folder, n_steps=8)
    return folder


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    write_tiny_run(folder, n_steps=40, gradient_accumulation_steps=2)
    return folder


@pytest.fixture(scope="session")
def base(full: Path) -> TrainPlan:
    return read_record(TrainPlan, full / "plan.json")
