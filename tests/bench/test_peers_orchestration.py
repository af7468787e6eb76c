"""What Snakemake costs: made-up runs in figures, and the commands of a run from its records."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "peers"))

from measured import Failed
from orchestration import SCRIPTS, SNAKEMAKE, compared
from project_copies import Copies, Timed, commands_of, covered_s


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    return Copies(tmp_path_factory.mktemp("a b") / "copies")


def test_a_program_that_another_started_counts_once() -> None:
    assert covered_s("0 10\n2 3\n9 12\n20 21\n") == 13
    assert covered_s("") == 0


def took(wall_s: float, jobs_s: float) -> Timed:
    return Timed(wall_s=wall_s, jobs_s=jobs_s, cpu_s=wall_s / 2)


def test_the_time_around_jobs_is_what_is_left_of_a_run() -> None:
    done = {
        SNAKEMAKE: {
            0: took(50, 40),
            1: took(64, 50),
        },
        SCRIPTS: {
            0: took(45, 44),
            1: took(48, 47),
        },
    }
    found = compared(done, 4)
    assert found["around_jobs_s"]["median"] == 12
    assert found["around_a_job_s"]["median"] == 3
    assert found["longer_a_job_s"]["median"] == (5 + 16) / 2 / 4
    assert found["more_cpu_a_job_s"]["median"] == (5 + 16) / 2 / 2 / 4
    assert found["workflow_over_scripts"]["least"] == pytest.approx(50 / 45)
    assert found["share_of_an_hour"] == 12 / 3612


def test_commands_come_in_the_order_of_the_run_and_once(tmp_path: Path) -> None:
    folder = tmp_path / ".snakemake" / "metadata"
    (folder / "deep").mkdir(parents=True)
    for name, command, start in (
        ("a", "second", 2.0), ("deep/b", "first", 1.0), ("c", "second", 2.0), ("d", None, 0.0),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps({"shellcmd": command, "starttime": start}))
    assert commands_of(tmp_path) == ["first", "second"]


def test_every_python_of_a_job_is_timed(copies: Copies) -> None:
    folder = copies.folder / "planned"
    folder.mkdir()
    command = "import pathlib, time; time.sleep(0.2); pathlib.Path('made').touch()"
    (folder / "run.sh").write_text(f'( exec python -c "{command}" )\n')
    took = copies.scripts()
    assert 0.2 <= took.jobs_s <= took.wall_s
    assert (copies.folder / "scripts" / "made").exists()
    # Each run begins with a copy in which nothing was made.
    assert not (folder / "made").exists()
    again = copies.scripts()
    assert 0.2 <= again.jobs_s <= again.wall_s


def test_a_run_that_fails_is_no_measurement(copies: Copies) -> None:
    with pytest.raises(Failed, match="MissingRule"):
        copies.workflow(copies.fresh("wrong"), "-n", "nothing-makes-this")


def test_a_source_is_cut_into_shards_in_the_copy_alone(copies: Copies) -> None:
    name = Path("config") / "experts" / "expert-json.yaml"
    before = (ROOT / name).read_bytes()
    copies.set_shards("expert-json", 7)
    manifest = yaml.safe_load((copies.code / name).read_text())
    assert manifest["demo"]["sources"][0]["n_shards"] == 7
    assert (ROOT / name).read_bytes() == before


def test_rows_are_compared_too_and_nothing_is_no_comparison(copies: Copies) -> None:
    copies.targets = Path("results/x")
    with pytest.raises(Failed, match="no result to compare"):
        copies.same_results()
    for name in ("flow", "scripts"):
        rows = copies.folder / name / copies.targets / "packed" / "train" / "data.arrow"
        rows.parent.mkdir(parents=True)
        rows.write_bytes(b"rows")
    assert copies.compared_results() == ["packed/train/data.arrow"]
    assert copies.same_results()
    rows.write_bytes(b"others")
    assert not copies.same_results()
