"""The stand-in for the driver, built once."""

from pathlib import Path

import nvml_stub
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))
