"""A user's own scoring task: its content counts, and a bundle needs permission to run it."""

import json
import os

import pytest
from bundle_boxes import BUNDLE, GPU_WORK, make_box
from test_reruns import SCORE
from workflow_space import REPORT, Workspace, manifest

from expertflow.core.files import sha256_file

pytestmark = [pytest.mark.chain, pytest.mark.long]
TASK = """
from expertflow.evaluate.scoring import Judgment, ScoringTask


class SameLength(ScoringTask):
    metric = "same_length"

    def judge(self, example, answer):
        same = len(answer.strip()) == len(example.reference)
        return Judgment("correct" if same else "other_length")
"""


def write_task(space: Workspace, text: str, name: str = "my_task.py") -> None:
    (space.root / name).write_text(text)
    evaluation = {**manifest()["evaluation"], "task": f"./{name}"}
    space.write_manifest("tiny", {**manifest(), "evaluation": evaluation})


def test_a_users_own_task_scores_reruns_and_travels(space: Workspace) -> None:
    write_task(space, TASK)
    assert space.planned() == {"check_references", *SCORE}
    space.run(REPORT)
    report = space.record("report.json")["evaluation"]
    digest = sha256_file(space.root / "my_task.py")
    assert (report["task"], report["metric"]) == ("my_task.py", "same_length")
    assert report["tools"]["my_task.py"] == f"sha256:{digest}"
    assert report["after"]["value_fraction"] is not None
    os.utime(space.root / "my_task.py")
    assert space.planned() == set()
    write_task(space, TASK.replace("strip", "rstrip"))
    assert space.planned() == {"check_references", *SCORE}
    assert "params have changed" in space.run("-n", REPORT)
    made = space.snakemake(BUNDLE)
    assert "it carries your own code, my_task.py (sha256 " in made.stderr
    box = make_box(space.root.with_name("box"), space)
    refused = box.refused_to_open(space.root / BUNDLE)
    assert "its maker's own code, my_task.py" in refused and "--allow-own-code" in refused
    box.open(space.root / BUNDLE, "--allow-own-code")
    # References are judged again, by the code that came with the bundle and lies elsewhere there.
    assert box.planned() == {"check_references", *GPU_WORK}
    # A bundle that hides its code is not run either.
    marker = box.root / "results/tiny/.bundle/opened.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "allow_own_code": False}))
    assert "opened without --allow-own-code" in box.refused(REPORT)


def test_a_file_without_a_task_is_rejected(space: Workspace) -> None:
    write_task(space, "import nothing_there\n", "other.py")
    assert "ModuleNotFoundError: No module named 'nothing_there'" in space.refused(REPORT)
    (space.root / "other.py").unlink()
    assert "other.py: no such file; correct evaluation.task" in space.refused(REPORT)
