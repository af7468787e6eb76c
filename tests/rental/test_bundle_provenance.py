"""Snakemake's records from a bundle: of its own expert's results, and of their known form."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertflow.core.errors import DataError
from expertflow.rental.bundle.provenance import write_provenance

RECORD: dict[str, Any] = {
    "rule": "plan_training", "input": ["results/e/packing.json"], "log": [], "params": ["'x'"],
    "code": None, "record_format_version": 6, "input_checksums": {},
}  # fmt: skip


def write(folder: Path, records: Any) -> list[Path]:
    write_provenance(folder, json.dumps(records), expert="e", time_s=1.0)
    return [path for path in folder.rglob("*") if path.is_file()]


def test_records_of_the_experts_own_results_are_written(tmp_path: Path) -> None:
    (record,) = write(tmp_path, {"results/e/plan.json": RECORD})
    assert json.loads(record.read_text())["params"] == ["'x'"]


@pytest.mark.parametrize(
    "key", ["results/other/plan.json", "/etc/hosts", "results/e/../other/plan.json", "results/e"]
)
def test_a_record_of_anything_else_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match=r"does not lie in results/e; make the bundle again"):
        write(tmp_path, {"results/e/plan.json": RECORD, key: RECORD})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "record",
    [[1], {}, {**RECORD, "input": "a"}, {**RECORD, "params": [1]}, {**RECORD, "shellcmd": "rm"}],
)
def test_a_record_of_another_form_is_refused(tmp_path: Path, record: Any) -> None:
    with pytest.raises(DataError, match="record of results/e/plan"):
        write(tmp_path, {"results/e/plan.json": record})
    with pytest.raises(DataError, match="are no object"):
        write(tmp_path, [])
