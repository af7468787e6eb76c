"""What tests of training share: a tiny run, and one warm process that trainers are forked from."""

from collections.abc import Iterator

import pytest
import tiny_run
from support import LORA
from trainers import Trainers

from expertflow.plan.records import TrainPlan
from expertflow.train.run import TrainInputs


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TrainInputs:
    """Return a run that is only read."""
    return tiny_run.made(tmp_path_factory.mktemp("tiny") / "run", lora=LORA)


@pytest.fixture
def plan(tiny: TrainInputs) -> TrainPlan:
    return tiny.plan
