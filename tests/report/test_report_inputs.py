"""Reading records and series from disk."""

import json
from pathlib import Path

import pytest
from msgspec.structs import fields, replace

from expertflow.core.errors import DataError
from expertflow.core.records import to_json, write_record
from expertflow.report.inputs import ReportInputs, read_inputs, read_lines
from expertflow.train.records import StepRecord

FILES = {"steps": "steps.jsonl", "samples": "gpu.jsonl", "profile": "profile/kernels.json"}


def _write(folder: Path, inputs: ReportInputs) -> None:
    for field in fields(inputs):
        record = getattr(inputs, field.name)
        path = folder / FILES.get(field.name, f"{field.name}.json")
        path.parent.mkdir(exist_ok=True)
        if isinstance(record, tuple):
            lines = [json.dumps(to_json(item)) for item in record]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif field.name not in ("spec", "ablation"):
            write_record(path, record)


def test_inputs_survive_the_disk(tmp_path: Path, cpu_inputs: ReportInputs) -> None:
    _write(tmp_path, cpu_inputs)
    assert read_inputs(cpu_inputs.spec, tmp_path) == cpu_inputs


def test_records_of_another_expert_are_refused(tmp_path: Path, cpu_inputs: ReportInputs) -> None:
    other = replace(cpu_inputs, export=replace(cpu_inputs.export, expert="expert-json"))
    _write(tmp_path, other)
    with pytest.raises(DataError, match=r"export: is about expert 'expert-json'"):
        read_inputs(cpu_inputs.spec, tmp_path)


def test_lines_end_at_newlines_alone(tmp_path: Path, cpu_inputs: ReportInputs) -> None:
    path = tmp_path / "steps.jsonl"
    line = json.dumps(to_json(cpu_inputs.steps[0]))
    path.write_bytes(f"{line}\n\n{line}".encode())
    assert len(read_lines(StepRecord, path)) == 2


@pytest.mark.parametrize("bad", ["{", '{"step": 1}', "[]"])
def test_bad_line_is_named(bad: str, tmp_path: Path, cpu_inputs: ReportInputs) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(to_json(cpu_inputs.steps[0])) + "\n" + bad, encoding="utf-8")
    with pytest.raises(DataError, match=r"steps\.jsonl:2"):
        read_lines(StepRecord, path)


def test_missing_series_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="series is missing"):
        read_lines(StepRecord, tmp_path / "steps.jsonl")
