"""Each check refuses its own fault, and names the path."""

from collections.abc import Callable
from typing import Any

import pytest

from expertflow.core.errors import DataError
from expertflow.report.check.report import check_report
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]


def _set(path: str, value: Any) -> Callable[[Report], None]:
    *way, last = path.split(".")

    def change(report: Report) -> None:
        for key in way:
            report = report[key]
        report[last] = value

    return change


FAULTS = {
    "unknown key": (_set("run.colour", "blue"), "run"),
    "missing key": (lambda report: report["data"].pop("documents"), "documents"),
    "wrong type": (_set("time.wall_s", "long"), "time.wall_s"),
    "wrong preset type": (_set("run.preset", None), "run.preset"),
    "fraction above one": (_set("throughput.mfu_fraction", 1.4), "throughput.mfu_fraction"),
    "too few epochs": (
        lambda report: report["training_report"]["training"]["epoch_summaries"].pop(),
        "epoch_summaries: 1 entries for 2 epochs",
    ),
    "one more epoch started": (
        _set("training_report.training.epochs", 2.01),
        "epoch_summaries: 2 entries for 3 epochs",
    ),
    "warm-up as long as training": (
        _set("training_parameters.warmup_steps", 1800),
        "training_parameters.warmup_steps",
    ),
    "time is lost": (_set("time.train_s", 2_450.0), "time: the parts"),
    "time is invented": (_set("time.other_s", 40.0), "time: the parts"),
    "wrong price": (_set("cost.usd", 2.10), "cost.usd"),
    "other hours": (_set("cost.hours", 0.76), "cost.hours"),
    "price without a rate": (_set("cost.usd_per_hour", None), "cost.usd"),
    "epochs of other tokens": (
        _set("data.trained_tokens", 86_400_001),
        "epoch_summaries: tokens add up to 86,400,000, not to 86,400,001",
    ),
    "epochs of other steps": (
        _set("training_report.training.steps", 1_799),
        "epoch_summaries: steps add up to 1,800, not to 1,799",
    ),
    "an epoch that missed rows": (
        _set("data.useful_tokens", 43_200_001),
        "epoch_summaries[0].tokens: 43,200,000 in 900 of 900 steps",
    ),
    "billed for another time": (_set("cost.billed_usd", 1.0), "cost.billed_usd: 1.0 is not"),
    "fixes worth more than the run": (
        lambda report: report["findings"][0].update(worth_usd=9.0),
        "findings: worth $9",
    ),
    "plan of other parts": (_set("plan.save_hours", 0.5), "plan.hours: is 0.73"),
    "memory of other parts": (
        lambda report: report["plan"]["memory"].update(step_bytes=1),
        "plan.memory_peak_bytes",
    ),
    "silent null": (
        _set("training_report.hardware.power_w", None),
        "training_report.hardware.power_w: null without a reason",
    ),
    "empty reason": (_set("unavailable", {"model.revision": ""}), "unavailable"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(
    name: str, gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    change, message = FAULTS[name]
    change(gpu_report)
    with pytest.raises(DataError, match=r"report\.json") as error:
        check_report(gpu_report, schema, gpu_inputs)
    assert message in str(error.value)


def test_time_may_be_one_percent_off(
    gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    gpu_report["time"]["other_s"] += 0.009 * gpu_report["time"]["wall_s"]
    check_report(gpu_report, schema, gpu_inputs)


def test_single_step_without_warmup(
    gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    gpu_report["training_parameters"] |= {"total_steps": 1, "warmup_steps": 0}
    check_report(gpu_report, schema, gpu_inputs)


def test_null_in_a_list_is_found(
    gpu_report: Report, schema: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    gpu_report["data"]["sources"][1]["licence"] = None
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.licence"):
        check_report(gpu_report, schema, gpu_inputs)


def test_every_key_is_described(schema: dict[str, Any]) -> None:
    bare = [path for path, node in _leaves(schema) if "description" not in node]
    passed_through = {"staging", "export"}  # records of other stages, described there
    assert [path for path in bare if path.split(".")[0] not in passed_through] == []


def _leaves(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []

    def walk(node: dict[str, Any], path: str) -> None:
        for key, below in node.get("properties", {}).items():
            place = f"{path}.{key}".removeprefix(".")
            name = below.get("$ref", "").removeprefix("#/$defs/")
            target = {**schema["$defs"].get(name, {}), **below}
            if name != "stats":
                walk(target, place)
            if "properties" not in target and target.get("type") != "array":
                found.append((place, target))

    walk(schema, "")
    return found
