"""The ablation within report.json: its form, its section, its finding, its line in the terminal."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_up_ablation import estimate, make_ablation, make_bar
from made_up_runs import PROVENANCE
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.records import from_json, to_json
from expertflow.hardware.probe import probe_machine
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.findings.hardware import (
    ONE_PROCESS,
    OTHER_HARDWARE,
    recomputed_s,
    switch_costs,
)
from expertflow.report.inputs import ReportInputs, read_inputs
from expertflow.report.page import render_page
from expertflow.report.summary import summary_rows
from expertflow.studies.records import AblationRecord

Report = dict[str, Any]


def _with(inputs: ReportInputs, **changed: Any) -> ReportInputs:
    name = inputs.monitor.gpu_name
    return replace(inputs, ablation=make_ablation(gpu_name=name, **changed))


def _report(inputs: ReportInputs) -> Report:
    return build_report(inputs, PROVENANCE)


def test_the_whole_record_is_in_the_report(gpu_inputs: ReportInputs) -> None:
    inputs = _with(gpu_inputs)
    report = _report(inputs)
    check_report(report, inputs)
    assert from_json(AblationRecord, report["comparison"][0]) == inputs.ablation


def test_the_page_shows_it_and_leads_to_all_of_it(gpu_inputs: ReportInputs) -> None:
    inputs = _with(gpu_inputs)
    page = render_page(_report(inputs), inputs)
    section = page[page.index('<section id="comparison"') :].split("</section>")[0]
    assert "32.3 times as fast." in section and section.count("<figure>") == 1
    assert 'href="ablation.html"' in section and "as claimed" in section
    assert page.index('id="data"') < page.index('id="comparison"') < page.index('id="findings"')


def test_without_one_the_page_says_how_to_get_it(gpu_inputs: ReportInputs) -> None:
    report = _report(gpu_inputs)
    page = render_page(report, gpu_inputs)
    assert report["comparison"] == []
    assert "--config ablate=true" in page and "results/expert-sql/ablation.json" in page
    assert "ablation.html" not in page


def test_the_terminal_has_a_line(gpu_inputs: ReportInputs) -> None:
    rows = dict(summary_rows(_report(_with(gpu_inputs)), html_path=Path("x")))
    assert rows["ablation"].startswith("plan \u00d732.3 (31.9 to 32.6) beside \u201cNaive loop")
    assert "claims: 1 as claimed" in rows["ablation"]
    assert "ablation" not in dict(summary_rows(_report(gpu_inputs), html_path=Path("x")))


def test_a_switch_that_slows_the_plan_is_found_and_priced(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    found = {item["code"]: item for item in report["findings"]}["switch-costs"]
    assert "Micro-batch 32" in found["evidence"] and "1.08 to 1.10" in found["evidence"]
    saved_s = report["time"]["train_s"] * (1 - 1 / 1.09)
    worth = report["cost"]["usd_per_hour"] * saved_s / 3600
    assert found["worth_usd"] == pytest.approx(worth)


def test_only_the_largest_switch_is_priced(gpu_inputs: ReportInputs) -> None:
    bars = tuple(make_bar(f"x{i}", f"change {i}", 1.1 + i / 10) for i in range(3))
    found = switch_costs(_report(_with(gpu_inputs, bars=bars, ladders=())))
    assert found is not None and "with \u201cchange 2\u201d" in found.evidence
    assert "so are \u201cchange 1\u201d, \u201cchange 0\u201d" in found.evidence


def test_recomputation_is_not_priced_twice(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    report["training_parameters"]["gradient_checkpointing"] = True
    report["plan"]["without_checkpointing_peak_bytes"] = 1
    report["model"]["flops_per_token_hardware"] = 1.05 * report["model"]["flops_per_token_model"]
    found = switch_costs(report)
    saved_s = report["time"]["train_s"] * (1 - 1 / 1.09) - recomputed_s(report)
    assert found is not None and found.worth_usd is not None and saved_s > 0
    assert found.worth_usd == pytest.approx(report["cost"]["usd_per_hour"] * saved_s / 3600)


def test_other_hardware_has_no_price_here(gpu_inputs: ReportInputs) -> None:
    found = switch_costs(_report(replace(gpu_inputs, ablation=make_ablation(gpu_name="another"))))
    assert found is not None and (found.worth_usd, found.worth_reason) == (None, OTHER_HARDWARE)


def _worth(inputs: ReportInputs, facts: dict[str, Any] | None, machine: str | None) -> Any:
    inputs = replace(_with(inputs, machine=machine), preflight={"machine": facts})
    found = switch_costs(_report(inputs))
    assert found is not None
    return OTHER_HARDWARE if found.worth_reason == OTHER_HARDWARE else found.worth_usd


def test_other_processors_have_no_price_here(gpu_inputs: ReportInputs) -> None:
    here = {"n_cpus_usable": 8, "cpu_model": "Made-up 9000"}
    assert _worth(gpu_inputs, here, "8 processors, Made-up 9000") > 0
    assert _worth(gpu_inputs, here, "4 processors, Made-up 9000") == OTHER_HARDWARE
    assert _worth(gpu_inputs, here, "8 processors, Another") == OTHER_HARDWARE
    assert _worth(gpu_inputs, {**here, "cpu_model": None}, "8 processors, unnamed") > 0
    # Nothing is known of one of the two.
    assert _worth(gpu_inputs, here, None) > 0 and _worth(gpu_inputs, None, "8 processors, X") > 0


def test_an_ablation_names_its_machine_as_the_rule_expects(
    gpu_inputs: ReportInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expertflow.studies import ablate_variant as module

    monkeypatch.setattr(module, "read_record", lambda *_: SimpleNamespace(hardware="x"))
    monkeypatch.setattr(module, "sha256_file", lambda _: "")
    spec = SimpleNamespace(variant=None)
    job = SimpleNamespace(expert="e", spec=spec, plan=None)
    machine = module._blank(cast(module.VariantJob, job)).machine
    assert _worth(gpu_inputs, to_json(probe_machine(table=[])), machine) > 0


def test_one_process_does_not_price_several(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    report["training_parameters"]["world_size"] = 2
    found = switch_costs(report)
    assert found is not None and (found.worth_usd, found.worth_reason) == (None, ONE_PROCESS)


def test_no_finding_without_a_faster_change(gpu_inputs: ReportInputs) -> None:
    odd = make_bar("x", "x", 1.2, is_sane=False)
    near = make_bar("y", "y", 1.04, ratio=estimate(1.04, 0.03))
    assert switch_costs(_report(_with(gpu_inputs, bars=(odd, near), ladders=()))) is None
    assert switch_costs(_report(gpu_inputs)) is None


def test_an_ablation_of_another_expert_is_refused(
    gpu_inputs: ReportInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expertflow.report import inputs as module

    stray = replace(gpu_inputs, ablation=make_ablation(expert="expert-json"))
    with pytest.raises(DataError, match="ablation: is about expert 'expert-json'"):
        module._check_same_expert(stray)
    with pytest.raises(DataError, match="missing"):
        read_inputs(gpu_inputs.spec, tmp_path, ablation=tmp_path / "ablation.json")
