"""Inputs and reports of the two made-up runs; all are built once."""

import made_up_runs
import pytest

from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import Report


@pytest.fixture(scope="session")
def gpu_inputs() -> ReportInputs:
    return made_up_runs.make_gpu_inputs()


@pytest.fixture(scope="session")
def cpu_inputs() -> ReportInputs:
    return made_up_runs.make_cpu_inputs()


@pytest.fixture(scope="session")
def gpu_report(gpu_inputs: ReportInputs) -> Report:
    return build_report(gpu_inputs, made_up_runs.PROVENANCE)


@pytest.fixture(scope="session")
def cpu_report(cpu_inputs: ReportInputs) -> Report:
    return build_report(cpu_inputs, made_up_runs.PROVENANCE)
