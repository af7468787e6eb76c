"""One warm process that all trainers are forked from."""

from collections.abc import Iterator

import pytest
from trainers import Trainers


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.close()
