"""The advice of errors works: each fault is provoked, its line followed, and the run succeeds."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support import flip_byte
from workflow_space import REPORT, SNAKEMAKE, Workspace

from expertflow.core.attempts import attempts_path, read_attempts

pytestmark = [pytest.mark.chain, pytest.mark.long]
TRAINING, STAGING = "results/tiny/training.json", "results/tiny/staging.json"
REPAIR = r"run make repair \((\S+)\), then run again$"
# Root without the right to open other users' files.
PLAIN_USER = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
NOBODY = 65534
# Settings, and the advice in the error line: a word and its correction, or what to add.
SUGGESTED = r"unknown key '(?:training\.)?(\w+)'; did you mean '(\w+)'"
MISTAKES = {
    "hardwar=cpu": SUGGESTED,
    "training={max_step: 6}": SUGGESTED,
    "training={world_size: 2}": r"add --(resources) (gpu=\d)",
}


class Fault(NamedTuple):
    """``provoke`` breaks results/tiny; the error matches ``line``, whose group is the remedy."""

    provoke: Callable[[Path], None]
    line: str
    target: str = REPORT


def damage_rows_to_train_on(tiny: Path) -> None:
    flip_byte(tiny / "packed/train/data-00000-of-00001.arrow")
    (tiny / "training.json").unlink()
    shutil.rmtree(tiny.parents[1] / "state" / "tiny")


def edit_a_record(tiny: Path) -> None:
    (tiny / "plan.json").write_text("{}")
    (tiny / "training.json").unlink()


def write_odd_sidecars(tiny: Path) -> None:
    (tiny / ".packing.json.fingerprint").write_text("{}")
    (tiny / ".model.json.fingerprint").write_text('{"rule": [1]}')
    for name in ("plan.json", "staging.json"):
        (tiny / name).unlink()


def cut_series_and_kernels(tiny: Path) -> None:
    for name in ("steps.jsonl", "gpu.jsonl", "profile/kernels.json"):
        content = (tiny / name).read_bytes()
        # Not in place: state/ has a hard link to it.
        (tiny / name).unlink()
        (tiny / name).write_bytes(content[: len(content) // 2])
    for name in ("report.json", "report.html"):
        (tiny / name).unlink(missing_ok=True)


FAULTS = (
    Fault(
        damage_rows_to_train_on,
        rf"packed/train/data-\S+: does not match results/tiny/packing\.json; {REPAIR}",
        TRAINING,
    ),
    Fault(edit_a_record, rf"plan\.json: does not match its sidecar; {REPAIR}", TRAINING),
    Fault(write_odd_sidecars, rf"\.fingerprint: .*; {REPAIR}", STAGING),
    Fault(cut_series_and_kernels, rf"tiny/\S+: does not match {TRAINING}; {REPAIR}"),
)


def make(space: Workspace, *arguments: str) -> tuple[int, str]:
    """Run Snakemake; return its exit code and the error it ends with."""
    done = space.snakemake(*arguments)
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.splitlines()[-1] if done.returncode else ""
    return done.returncode, last


@pytest.fixture(scope="module")
def walked(finished: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a finished run; each fault is fixed once its remedy was followed."""
    return finished.copy(tmp_path_factory.mktemp("walked") / "space")


@pytest.mark.parametrize("setting", MISTAKES)
def test_the_advice_on_a_mistake_works(walked: Workspace, setting: str) -> None:
    line = walked.refused("-n", REPORT, "--config", setting)
    found = re.search(MISTAKES[setting], line)
    assert found, line
    first, second = found.groups()
    more = (f"--{first}", second) if first == "resources" else ()
    walked.run("-n", REPORT, *more, "--config", setting.replace(first, second))


def test_a_folder_that_this_user_cannot_write(walked: Workspace) -> None:
    state = walked.root / "state" / "tiny"
    command: list[object] = [SNAKEMAKE, "--cores", "2", TRAINING, "--quiet", "all"]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes everywhere")
        command = [*PLAIN_USER, *command]
        os.chown(state, NOBODY, NOBODY)
    state.chmod(0o555)
    failed = walked.execute(*command)
    line = "error: state/tiny: cannot be written; correct its permissions, or use --directory"
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1] == line
    state.chmod(0o777)
    assert walked.execute(*command).returncode == 0


def test_a_training_that_diverges_is_tried_once(walked: Workspace) -> None:
    # Beyond fp32, so that weights are infinite after one step, however a machine rounds.
    code, line = make(walked, TRAINING, "--config", "training={learning_rate: 1.0e+39}")
    assert code == 1 and re.match("error: .* lower training.learning_rate", line), line
    logs = walked.root / "results" / "tiny" / "logs"
    (attempt,) = read_attempts(attempts_path(logs / "train_expert.log"))
    assert attempt.error == line
    assert make(walked, TRAINING) == (0, "")


@pytest.mark.parametrize(
    ("provoke", "line", "target"), FAULTS, ids=[fault.provoke.__name__ for fault in FAULTS]
)
def test_the_advice_in_a_line_works(
    walked: Workspace, provoke: Callable[[Path], None], line: str, target: str
) -> None:
    provoke(walked.root / "results" / "tiny")
    code, output = make(walked, target)
    found = re.search(f"^error: .*{line}", output)
    assert code == 1 and found, output
    walked.script(Path(found[1]).stem)
    assert make(walked, target) == (0, "")


def test_no_fault_leaves_anything_behind(walked: Workspace) -> None:
    walked.snakemake(REPORT)
    assert walked.script("verify_results").stdout.endswith(": intact\n")
