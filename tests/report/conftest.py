"""Inputs, reports and pages of the two made-up runs; all are made once."""

import made_up_runs
import pytest
from msgspec.structs import replace

from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import render_page
from expertflow.report.records import Report


@pytest.fixture(scope="session")
def gpu_inputs() -> ReportInputs:
    return made_up_runs.make_gpu_inputs()


@pytest.fixture(scope="session")
def cpu_inputs() -> ReportInputs:
    return made_up_runs.make_cpu_inputs()


@pytest.fixture(scope="session")
def short_inputs(gpu_inputs: ReportInputs) -> ReportInputs:
    """The rented GPU's run without its series: charts take most of the time of a page."""
    return replace(gpu_inputs, steps=(), samples=())


@pytest.fixture(scope="session")
def gpu_report(gpu_inputs: ReportInputs) -> Report:
    return build_report(gpu_inputs, made_up_runs.PROVENANCE)


@pytest.fixture(scope="session")
def cpu_report(cpu_inputs: ReportInputs) -> Report:
    return build_report(cpu_inputs, made_up_runs.PROVENANCE)


@pytest.fixture(scope="session")
def gpu_page(gpu_report: Report, gpu_inputs: ReportInputs) -> str:
    return render_page(gpu_report, gpu_inputs)


@pytest.fixture(scope="session")
def cpu_page(cpu_report: Report, cpu_inputs: ReportInputs) -> str:
    return render_page(cpu_report, cpu_inputs)
