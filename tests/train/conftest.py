"""Fixtures for tests of training: a tiny run, and a warm process from which trainers fork."""

from collections.abc import Iterator

import pytest
import tiny_run
import torch
from support import LORA
from test_attention_routes import newest
from trainers import Trainers

from expertflow.plan.records import TrainPlan
from expertflow.train.model import attention
from expertflow.train.run import TrainInputs


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.close()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernel that needs a card with plain operations."""
    monkeypatch.setattr(attention, "KERNEL", newest)
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    monkeypatch.setattr(attention, "varlen_unavailable_reason", lambda *_: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TrainInputs:
    """Return a read-only run."""
    return tiny_run.made(tmp_path_factory.mktemp("tiny") / "run", lora=LORA)


@pytest.fixture
def plan(tiny: TrainInputs) -> TrainPlan:
    return tiny.plan
