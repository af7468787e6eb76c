"""Inputs and reports of the two made-up runs; both are built once, tests that change them copy."""

import copy
from typing import Any

import made_up_runs
import pytest

from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs


@pytest.fixture(scope="session")
def gpu_inputs() -> ReportInputs:
    return made_up_runs.make_gpu_inputs()


@pytest.fixture(scope="session")
def cpu_inputs() -> ReportInputs:
    return made_up_runs.make_cpu_inputs()


@pytest.fixture
def gpu_report(gpu_inputs: ReportInputs) -> dict[str, Any]:
    return copy.deepcopy(build_report(gpu_inputs, made_up_runs.PROVENANCE))


@pytest.fixture
def cpu_report(cpu_inputs: ReportInputs) -> dict[str, Any]:
    return copy.deepcopy(build_report(cpu_inputs, made_up_runs.PROVENANCE))
