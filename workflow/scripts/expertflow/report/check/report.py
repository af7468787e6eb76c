"""Refuse a report that contradicts itself, lacks a key, or is silent about a missing value."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from expertflow.core.errors import DataError
from expertflow.plan.cost import billed_hours
from expertflow.report.check.evaluation import EVALUATION_CHECKS
from expertflow.report.check.run import RUN_CHECKS, check_against_records
from expertflow.report.derive import n_epochs_started
from expertflow.report.inputs import ReportInputs

Report = dict[str, Any]

TIME_PARTS = (
    "startup_s",
    "data_wait_s",
    "h2d_s",
    "train_s",
    "checkpoint_s",
    "eval_s",
    "other_s",
)


def read_schema(path: Path) -> dict[str, Any]:
    """Read the schema of report.json."""
    schema: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return schema


def read_report(path: Path, schema: dict[str, Any]) -> Report:
    """Read a finished report, as a reader of its figures needs it.

    Raises:
        DataError: it is missing, damaged, or of another version of the schema.
    """
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no report; run snakemake {path}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); delete it and make it again") from error
    try:
        _check_schema(report, schema)
    except DataError as error:
        raise DataError(
            f"{path}: older or damaged ({error}); delete it and make it again"
        ) from error
    return report


def check_report(report: Report, schema: dict[str, Any], inputs: ReportInputs) -> None:
    """Check form first, then what the numbers say together, then the report against its records.

    Raises:
        DataError: with the path of the first fault in report.json.
    """
    _check_schema(report, schema)
    own = (_check_epochs, _check_warmup, _check_time, _check_cost)
    for check in (*own, *RUN_CHECKS, *EVALUATION_CHECKS):
        check(report)
    check_against_records(report, inputs)
    _check_unavailable(report, schema)


def _check_schema(report: Report, schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(report))
    if error is not None:
        raise DataError(f"report.json{error.json_path.removeprefix('$')}: {error.message:.200}")


def _check_epochs(report: Report) -> None:
    training = report["training_report"]["training"]
    started, found = n_epochs_started(training["epochs"]), len(training["epoch_summaries"])
    if found != started:
        raise DataError(
            "report.json.training_report.training.epoch_summaries: "
            f"{found} entries for {started} epochs started"
        )


def _check_warmup(report: Report) -> None:
    parameters = report["training_parameters"]
    n_warmup, n_steps = parameters["warmup_steps"], parameters["total_steps"]
    if n_warmup >= n_steps:
        raise DataError(
            f"report.json.training_parameters.warmup_steps: {n_warmup} is not below "
            f"total_steps {n_steps}"
        )


def _check_time(report: Report) -> None:
    time = report["time"]
    parts_s, wall_s = sum(time[part] or 0.0 for part in TIME_PARTS), time["wall_s"]
    if abs(parts_s - wall_s) > 0.01 * wall_s:
        raise DataError(
            f"report.json.time: the parts add up to {parts_s:.3f} s, wall_s is {wall_s:.3f} s"
        )


def _check_cost(report: Report) -> None:
    cost, hours = report["cost"], report["time"]["wall_s"] / 3600
    if abs(cost["hours"] - hours) > 1e-9 * hours:
        raise DataError(f"report.json.cost.hours: {cost['hours']} is not wall_s = {hours} h")
    usd, rate = cost["usd"], cost["usd_per_hour"]
    if (usd is None) != (rate is None):
        raise DataError("report.json.cost.usd: must be known exactly when usd_per_hour is")
    if usd is None:
        return
    expected = rate * hours
    if abs(usd - expected) > 1e-6 * max(expected, 1e-9):
        raise DataError(f"report.json.cost.usd: {usd} is not rate x hours = {expected}")
    billed, minutes = cost["billed_usd"], report["plan"]["billing_minutes"]
    expected = rate * billed_hours(hours, minutes)
    if billed is None or abs(billed - expected) > 1e-6 * max(expected, 1e-9):
        raise DataError(f"report.json.cost.billed_usd: {billed} is not rate x hours = {expected}")


def _check_unavailable(report: Report, schema: dict[str, Any]) -> None:
    reasons = report["unavailable"]
    nulls = measurable_nulls(report, schema, schema)
    missing = next((path for path in nulls if not reasons.get(path)), None)
    if missing is not None:
        raise DataError(f"report.json.{missing}: null without a reason in 'unavailable'")


def measurable_nulls(
    value: Any, node: dict[str, Any], schema: dict[str, Any], path: str = ""
) -> Iterator[str]:
    """Walk a value beside its schema; yield the path of each null marked ``measurable``."""
    node = _resolve(node, schema)
    if value is None:
        if node.get("measurable"):
            yield path
    elif isinstance(value, dict):
        for key, below in node.get("properties", {}).items():
            if key in value:
                place = f"{path}.{key}" if path else key
                yield from measurable_nulls(value[key], below, schema, place)
    elif isinstance(value, list) and "items" in node:
        for index, item in enumerate(value):
            yield from measurable_nulls(item, node["items"], schema, f"{path}[{index}]")


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follow local references; keys beside a ``$ref`` win over those behind it."""
    if "$ref" not in node:
        return node
    name = node["$ref"].removeprefix("#/$defs/")
    target: dict[str, Any] = _resolve(schema["$defs"][name], schema)
    return {**target, **node}
