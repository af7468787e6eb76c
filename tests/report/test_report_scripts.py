"""The scripts that read finished reports, and which reports a run ends with."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.config.guard import reports_to_sum_up

Report = dict[str, Any]


def _run(script: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr("sys.argv", [script, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("script", ["show_report", "compare_experts"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no report; run snakemake"),
        ("{", "not JSON"),
        ("[]", "older or damaged"),
        ('{"schema_version": 1}', "older or damaged"),
    ],
)
def test_a_report_that_cannot_be_read_is_one_line(
    script: str, text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    outputs = ["--json", str(tmp_path / "i.json"), "--html", str(tmp_path / "i.html")]
    arguments = [str(path)] if script == "show_report" else ["--reports", str(path), *outputs]
    said = _run(script, *arguments, monkeypatch=monkeypatch)
    assert isinstance(said, str) and said.startswith(f"error: {path}: {message}")
    assert not (tmp_path / "i.json").exists()


def test_whole_reports_are_read(
    cpu_report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(cpu_report))
    assert _run("show_report", str(path), monkeypatch=monkeypatch) == 0
    outputs = ["--json", str(tmp_path / "i.json"), "--html", str(tmp_path / "i.html")]
    assert _run("compare_experts", "--reports", str(path), *outputs, monkeypatch=monkeypatch) == 0
    assert json.loads((tmp_path / "i.json").read_text())["experts"][0]["expert"] == "expert-sql"


def test_a_run_ends_with_the_reports_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for expert, made_s in (("old", 99), ("new", 101), ("other", 101)):
        path = Path("results", expert, "report.json")
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (made_s, made_s))
    experts = ["old", "new", "missing"]
    new, old = "results/new/report.json", "results/old/report.json"
    assert reports_to_sum_up([], experts, since_s=100) == [new]
    assert reports_to_sum_up(["results/index.html"], experts, since_s=100) == [new]
    assert reports_to_sum_up([old], experts, since_s=100) == [old, new]
    assert reports_to_sum_up([], experts) == []
