"""What Snakemake costs: the commands of a run from its records, and what is compared."""

import json
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "peers"))

from measured import Failed
from orchestration import SCRIPTS, WHOLE, Copies, Timed, read_commands, tabulate


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    return Copies(tmp_path_factory.mktemp("a b") / "copies", "results/x/packing.json")


def test_ratios_are_taken_within_a_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {WHOLE: (50.0, 64.0), SCRIPTS: (25.0, 16.0), "cold dry run": (2.0, 4.0),
               "empty Snakefile": (1.0, 1.0)}  # fmt: skip
    done = {
        line: {i: Timed(wall_s=s, cpu_s=s / 2) for i, s in enumerate(both)}
        for line, both in seconds.items()
    }
    found = tabulate(done)
    assert found[f"{WHOLE} / {SCRIPTS}"]["median"] == 3
    assert found[WHOLE]["cpu_s"]["median"] == 28.5
    assert "3.00 (2.00-4.00)" in capsys.readouterr().out


def test_commands_come_in_the_order_of_the_run_and_once(tmp_path: Path) -> None:
    folder = tmp_path / ".snakemake" / "metadata"
    (folder / "deep").mkdir(parents=True)
    for name, command, start in (
        ("a", "second", 2.0), ("deep/b", "first", 1.0), ("c", "second", 2.0), ("d", None, 0.0),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps({"shellcmd": command, "starttime": start}))
    assert read_commands(tmp_path) == ["first", "second"]


def test_a_run_that_fails_is_no_measurement(copies: Copies) -> None:
    with pytest.raises(Failed, match="MissingRule"):
        copies.run_workflow(copies.make_fresh("wrong"), "-n", "nothing-makes-this")


def test_rows_are_compared_too_and_nothing_is_no_comparison(copies: Copies) -> None:
    with pytest.raises(Failed, match="no result to compare"):
        copies.compared_results()
    for name in ("flow", "scripts"):
        rows = copies.folder / name / "results" / "x" / "packed" / "train" / "data.arrow"
        rows.parent.mkdir(parents=True)
        rows.write_bytes(b"rows")
    assert copies.compared_results() == ["packed/train/data.arrow"]
    rows.write_bytes(b"others")
    with pytest.raises(Failed, match="different results"):
        copies.compared_results()
