"""What the page puts beside each other: plan and run, memory and card, other hardware, machine."""

import copy
from typing import Any

import pytest

from expertflow.report import format as f
from expertflow.report.view import hardware as view_hardware
from expertflow.report.view import plan as view_plan
from expertflow.report.view import report as view
from expertflow.report.view import staging as view_staging

Report = dict[str, Any]


def test_plan_rows_say_whether_the_band_held(gpu_report: Report, cpu_report: Report) -> None:
    rows = {row.label: row for row in view_plan.plan_rows(gpu_report)}
    assert rows["Optimiser steps"].difference == "0" and rows["Optimiser steps"].is_inside is None
    assert rows["Wall time"].is_inside is True and rows["Wall time"].band
    late = copy.deepcopy(gpu_report)
    next(r for r in late["plan_against_actual"] if r["quantity"] == "Cost")["actual"] = 99.0
    assert {row.label: row for row in view_plan.plan_rows(late)}["Cost"].is_inside is False
    blank = {row.label: row for row in view_plan.plan_rows(cpu_report)}["Cost"]
    assert blank.plan.text == "not predicted" and blank.plan.reason
    assert blank.actual.text == "not measured" and blank.actual.reason


def test_every_unit_of_the_plan_has_a_way_to_be_shown(gpu_report: Report) -> None:
    units = {row["unit"] for row in gpu_report["plan_against_actual"]}
    assert units <= set(view_plan.SHOWN)


def test_memory_is_drawn_to_the_scale_of_the_card(gpu_report: Report, cpu_report: Report) -> None:
    memory = view_plan.memory(gpu_report)
    assert memory is not None and memory.actual_fraction is not None
    total = gpu_report["training_report"]["hardware"]["gpu"]["memory_total_bytes"]
    predicted = sum(gpu_report["plan"]["memory"].values())
    assert sum(part.fraction for part in memory.parts) == pytest.approx(predicted / total)
    assert view_plan.memory(cpu_report) is None


def test_options_that_do_not_fit_or_have_no_price_say_so(gpu_report: Report) -> None:
    shown = view_plan.options(gpu_report)
    assert len(shown) == len(gpu_report["plan"]["options"]) > 1
    for option, item in zip(shown, gpu_report["plan"]["options"], strict=True):
        assert (option.micro_batch == "does not fit") == (item["fits"] is False)
        assert (option.usd == "unknown") == (item["usd"] is None)
        assert option.remark == item["remark"]


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
    (name, rows), (_, weights) = view_staging.staging(gpu_report)
    assert name == "rows read from" and "/scratch/expertflow/" in rows and "verified" in rows
    assert f"copied at {f.size(1.1e9)}/s" in rows and "nfs4, read at 0.24 GB/s" in rows
    assert "1.19" in weights or "1.2" in weights
    (_, rows), _ = view_staging.staging(cpu_report)
    assert rows.startswith("results/expert-sql/packed (") and "local disk already" in rows


def test_a_fallback_is_shown_as_one(gpu_report: Report) -> None:
    used = gpu_report["staging"]["used"]["rows"]
    used |= {"is_fallback": True, "target": None, "action": "read_in_place", "reason": "disk full"}
    (_, rows), _ = view_staging.staging(gpu_report)
    assert "a fallback): disk full" in rows
