"""What the page puts beside each other: plan and run, memory and card, other hardware, machine."""

import copy
import html
import re
from typing import Any

import pytest

from expertflow.report import format as f
from expertflow.report import view, view_hardware
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import render_page

Report = dict[str, Any]


def _rows(report: Report, inputs: ReportInputs, section: str) -> dict[str, str]:
    """Return the lines of the first table of a section of the page by their first cell."""
    table = render_page(report, inputs).split(section)[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*><td>([^<]+?) *<(.*?)</tr>", table, re.DOTALL)
    return {name.strip(): html.unescape(rest) for name, rest in rows}


PLAN = '<section id="plan">'
OPTIONS = "The same work on other hardware"


def test_plan_rows_say_whether_the_band_held(
    gpu_report: Report, gpu_inputs: ReportInputs, cpu_report: Report, cpu_inputs: ReportInputs
) -> None:
    rows = _rows(gpu_report, gpu_inputs, PLAN)
    assert ">0</td>" in rows["Optimiser steps"] and "the band" not in rows["Optimiser steps"]
    assert "within the band" in rows["Wall time"] and " to " in rows["Wall time"]
    next(r for r in gpu_report["plan_against_actual"] if r["quantity"] == "Cost")["actual"] = 99.0
    assert "outside the band" in _rows(gpu_report, gpu_inputs, PLAN)["Cost"]
    blank = _rows(cpu_report, cpu_inputs, PLAN)["Cost"]
    assert blank.count("not predicted") == blank.count("not measured") == 1
    assert blank.count('title="') == 2


def test_every_unit_of_the_plan_has_a_way_to_be_shown(gpu_report: Report) -> None:
    units = {row["unit"] for row in gpu_report["plan_against_actual"]}
    assert units <= set(view.SHOWN)


def test_memory_is_drawn_to_the_scale_of_the_card(gpu_report: Report, cpu_report: Report) -> None:
    memory = view.memory(gpu_report)
    assert memory is not None and memory["actual_fraction"] is not None
    total = gpu_report["training_report"]["hardware"]["gpu"]["memory_total_bytes"]
    predicted = sum(gpu_report["plan"]["memory"].values())
    assert sum(part.fraction for part in memory["parts"]) == pytest.approx(predicted / total)
    assert view.memory(cpu_report) is None


def test_options_that_do_not_fit_or_have_no_price_say_so(
    gpu_report: Report, gpu_inputs: ReportInputs
) -> None:
    shown = _rows(gpu_report, gpu_inputs, OPTIONS)
    assert len(shown) == len(gpu_report["plan"]["options"]) > 1
    for item in gpu_report["plan"]["options"]:
        option = shown[f"{item['n_gpus']} \u00d7 {item['name']}"]
        assert ("does not fit" in option) == (item["fits"] is False)
        assert ("unknown" in option) == (item["usd"] is None)
        assert item["remark"] in option


def test_tiles_lay_the_plan_beside_the_run(gpu_report: Report) -> None:
    tiles = {tile.label: tile for tile in view.tiles(gpu_report)}
    assert len(tiles) == 8
    for label in ("Wall time", "Cost"):
        assert "plan " in tiles[label].note and tiles[label].note.endswith("%")
    assert "free" in tiles["Peak GPU memory"].note


def test_the_source_of_the_split_is_said_only_where_it_was_sampled(
    gpu_report: Report, cpu_report: Report
) -> None:
    assert "90 sampled steps" in view.split_note(gpu_report)
    assert view.split_note(cpu_report) == ""


def test_machine_lines_leave_out_what_was_not_read(gpu_report: Report, cpu_report: Report) -> None:
    gpu, cpu = (dict(view_hardware.rows(report)) for report in (gpu_report, cpu_report))
    assert f.energy(gpu_report["training_report"]["hardware"]["energy_j"]) in gpu["Energy"]
    assert {"Power", "Hottest", "Held back", "Clocks", "PCIe"} <= set(gpu)
    assert not {"Energy", "Power", "Hottest", "Held back", "Clocks", "PCIe"} & set(cpu)
    quiet = copy.deepcopy(gpu_report)
    quiet["training_report"]["hardware"]["throttle_s"] = {"thermal": 0.0}
    assert dict(view_hardware.rows(quiet))["Held back"] == "never"


def test_a_machine_that_says_nothing_of_itself_has_no_lines(gpu_report: Report) -> None:
    assert view_hardware.machine(gpu_report)
    gpu_report["training_report"]["hardware"]["machine"] = None
    assert view_hardware.machine(gpu_report) == []


def test_the_page_says_where_training_read_from_and_why(
    gpu_report: Report, cpu_report: Report
) -> None:
    (name, rows), (_, weights) = view_hardware.staging(gpu_report)
    assert name == "rows read from" and "/scratch/expertflow/" in rows and "verified" in rows
    assert f"copied at {f.size(1.1e9)}/s" in rows and "nfs4, read at 0.24 GB/s" in rows
    assert "1.19" in weights or "1.2" in weights
    (_, rows), _ = view_hardware.staging(cpu_report)
    assert rows.startswith("results/expert-sql/packed (") and "local disk already" in rows


def test_a_fallback_is_shown_as_one(gpu_report: Report) -> None:
    used = gpu_report["staging"]["used"]["rows"]
    used |= {"is_fallback": True, "target": None, "action": "read_in_place", "reason": "disk full"}
    (_, rows), _ = view_hardware.staging(gpu_report)
    assert "a fallback): disk full" in rows
