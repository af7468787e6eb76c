"""The section on kernels: what was watched, why not, and names that hold markup."""

from typing import Any

import pytest
from made_up_profile import make_profile, not_profiled
from made_up_runs import PROVENANCE
from msgspec.structs import replace

from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import render_page

HOSTILE = "void f<A<int>, B&><script>alert(1)</script>\" onload='x'"


def page_of(inputs: ReportInputs) -> tuple[dict[str, Any], str]:
    report = build_report(inputs, PROVENANCE)
    check_report(report, inputs)
    return report, render_page(report, inputs)


def test_the_longest_kernels_are_shown(gpu_inputs: ReportInputs) -> None:
    report, page = page_of(gpu_inputs)
    profile = report["profile"]
    assert len(profile["kernels"]) == 15 < profile["n_kernels"] == 25
    assert sum(kind["share_fraction"] for kind in profile["by_kind"]) == pytest.approx(1)
    assert profile["overhead_fraction"] == pytest.approx(0.2)
    assert profile["trace"] == "results/expert-sql/profile/trace.json.gz"
    section = page.split('<section id="kernels">')[1].split("</section>")[0]
    assert "steps 12 to 16" in section and "15 of 25" in section
    assert "Matrix products" in section and "nvjet_hsh_128x256" in section
    assert "training waited 3.4\u00a0s" in section and "opened in Perfetto" in section
    assert "FlashAttnBwdSm90&lt;(int)128, A &amp; B&gt;" in section
    assert "Kernels were not profiled" not in page


def test_a_run_without_has_one_line(cpu_inputs: ReportInputs) -> None:
    report, page = page_of(cpu_inputs)
    assert report["profile"] is None
    assert report["unavailable"]["profile"] == "training.profile_steps is 0"
    assert 'id="kernels"' not in page
    assert "Kernels were not profiled: training.profile_steps is 0." in page
    _, page = page_of(replace(cpu_inputs, profile=not_profiled("no CUPTI <here>")))
    assert "Kernels were not profiled: no CUPTI &lt;here&gt;." in page


def test_what_a_profile_lacks_is_said(gpu_inputs: ReportInputs) -> None:
    missing = {"trace": "it is too large", "n_trace_bytes": "it is too large",
               "neighbour_step_s": "none came before", "device_busy_fraction": "a CPU"}  # fmt: skip
    profile = replace(
        make_profile(), device="cpu", n_neighbour_steps=0, unavailable=missing,
        notes=("at most 2 of the 5 steps asked for",),
        **dict.fromkeys(missing),
    )  # fmt: skip
    report, page = page_of(replace(gpu_inputs, profile=profile))
    assert report["unavailable"]["profile.overhead_fraction"] == "none came before"
    assert report["unavailable"]["profile.trace"] == "it is too large"
    assert "No trace: it is too large." in page and "that each spent itself" in page
    assert "At most 2 of the 5 steps asked for." in page
    assert "<th>operator</th>" in page and "Longest operators" in page


def test_names_of_kernels_are_escaped_and_cut(gpu_inputs: ReportInputs) -> None:
    profile = make_profile()
    first, second, *others = profile.kernels
    table = (replace(first, name=HOSTILE), replace(second, name="x" * 300), *others)
    _, page = page_of(replace(gpu_inputs, profile=replace(profile, kernels=table)))
    assert "<script>" not in page and "B&amp;&gt;&lt;script&gt;" in page
    assert "x" * 160 in page and "x" * 161 not in page
