"""Damage below results/ and state/ is listed; only corrupt files are removed."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import SCRIPTS, flip_byte, run_script

from expertflow.config.attach import only_looks
from expertflow.config.damage import find_problems, repair
from expertflow.config.recovery import note_missing_files, remove_corrupt_records
from expertflow.core.files import remove
from expertflow.core.locks import EXPERT_LOCKS, flock
from expertflow.core.records import seal, write_sealed
from expertflow.core.sidecars import write_sidecar
from expertflow.train.saved.checkpoint_files import OURS, TENSORS, hash_contents

STATE = Path("state/e/abc")
STEP = STATE / "checkpoints" / "step-00000002"


def write(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with small results and a finished training."""
    monkeypatch.chdir(tmp_path)
    e = Path("results/e")
    for record, files in (
        (e / "documents.json", {"keep.arrow": "kept"}),
        (e / "model.json", {"base_model/model.safetensors": "base", "base_model/config.json": ""}),
        (e / "training.json", {"steps.jsonl": "{}"}),
        (e / "report.json", {"report.html": "page"}),
        (Path("results/index.json"), {"index.html": "all"}),
    ):
        made = [write(record.parent / name, text) for name, text in files.items()]
        write_sidecar(write(record), spec="", code="", files=made)
    write(e / "logs" / "train_expert.log", "trained")
    write_sealed(e / "logs" / "train_expert.attempts.json", {"attempts": []})
    store = Path("state/.tokens/key")
    write_sidecar(
        write(store / "record.json"), spec="", code="", files=[write(store / "tokens.ids", "ids")]
    )
    for name in TENSORS:
        write(STEP / name, name)
    progress = {"step": 2, OURS: hash_contents(STEP, TENSORS)}
    write(STEP / "progress.json", json.dumps(seal(progress)))
    write(STATE / "final" / "model.safetensors", "trained")
    write(STATE / "expertflow-e" / "events.out.tfevents.1", "of TensorBoard")
    names = ["final/model.safetensors", "steps.jsonl"]
    write(STATE / "steps.jsonl", "steps")
    write_sealed(STATE / "outcome.json", {"files": hash_contents(STATE, names)})
    lines = (json.dumps(seal({"n": n})) for n in range(3))
    write(Path("state/.evaluations/e.jsonl"), "".join(f"{line}\n" for line in lines))
    return tmp_path


def verify() -> list[str]:
    problems, summary = find_problems(Path())
    assert "files read" in summary
    return [*map(str, problems)]


def run_repair() -> None:
    repair(find_problems(Path())[0])


SIDECAR = Path("results/e/.model.json.fingerprint")
# What is damaged, and what is removed besides it and the reports.
FLIPPED = {
    "results/e/keep.arrow": ["results/e/documents.json", "results/e/.documents.json.fingerprint"],
    "results/e/documents.json": ["results/e/.documents.json.fingerprint"],
    "results/e/base_model/model.safetensors": ["results/e/model.json", str(SIDECAR)],
    str(SIDECAR): ["results/e/model.json"],
    "results/e/logs/train_expert.attempts.json": [],
    "results/e/report.html": [],
    "state/.tokens/key/tokens.ids": ["state/.tokens/key"],
    "state/.tokens/key/.record.json.fingerprint": ["state/.tokens/key"],
    f"{STATE}/final/model.safetensors": [f"{STATE}/outcome.json", f"{STATE}/final"],
    f"{STATE}/steps.jsonl": [f"{STATE}/outcome.json"],
    f"{STATE}/outcome.json": [],
    f"{STEP}/weights.safetensors": [str(STEP)],
    f"{STEP}/progress.json": [str(STEP)],
}
REPORTS = [
    f"results/{folder}{stem}"
    for folder, name in (("e/", "report"), ("", "index"))
    for stem in (f"{name}.json", f".{name}.json.fingerprint", f"{name}.html")
]


@pytest.mark.parametrize("name", FLIPPED)
def test_a_flipped_byte_is_reported_and_the_files_record_is_removed(place: Path, name: str) -> None:
    assert verify() == []
    before = set(place.rglob("*"))
    flip_byte(Path(name))
    damaged = [line for line in verify() if ": unknown, no record lists it" not in line]
    assert len(damaged) == 1 and ": damaged, " in damaged[0]
    assert damaged[0].startswith((name, str(STEP)))
    run_repair()
    gone = [name, *FLIPPED[name], *(REPORTS if name.startswith("results/") else [])]
    below = {path for path in before for top in gone if path.is_relative_to(place / top)}
    assert before - set(place.rglob("*")) == below
    kinds = {line.split(": ")[1].split(",")[0] for line in verify()}
    assert kinds <= {"unknown"}


def test_odd_files_are_problems_and_others_are_read(place: Path) -> None:
    odd: dict[str, Callable[[Path], object]] = {
        "results/e/.documents.json.fingerprint": lambda path: path.write_text('{"sha256": 1}'),
        "results/e/.training.json.fingerprint": lambda path: path.write_text("[[["),
        "results/e/keep.arrow": lambda path: (remove(path), path.mkdir()),
        "results/e/base_model/config.json": remove,
        "results/e/mine.txt": lambda path: path.write_text("mine"),
        "state/.tokens/.other.1.partial/tokens.ids": lambda path: write(path),
    }
    for name, spoil in odd.items():
        spoil(Path(name))
    flip_byte(Path("results/e/report.html"))
    kinds = {line.split(": ")[0]: line.split(": ")[1].split(",")[0] for line in verify()}
    assert kinds.pop("results/e/report.html") == "damaged"
    assert kinds.pop("results/e/base_model/config.json") == "missing"
    Path("results/e/model.json").unlink()
    assert "results/e/model.json: missing, its sidecar lists it" in verify()
    unknown = {name for name, kind in kinds.items() if kind == "unknown"}
    assert unknown == {"results/e/mine.txt", "results/e/steps.jsonl", [*odd][-1]}


def test_only_the_damaged_lines_of_a_history_are_removed(place: Path) -> None:
    history = Path("state/.evaluations/e.jsonl")
    lines = history.read_text().splitlines()
    flip_byte(history)
    assert "damaged, 1 of 3 lines" in verify()[0]
    run_repair()
    assert history.read_text().splitlines() == [lines[0], lines[2]]
    assert verify() == []


def test_the_scripts_list_what_is_damaged_and_remove_it(place: Path) -> None:
    flip_byte(Path("results/e/keep.arrow"))
    damaged = "results/e/keep.arrow: damaged, does not match results/e/documents.json"
    done = run_script("verify_results")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0] == damaged and done.stdout.endswith(": 1 damaged\n")
    gone = ["documents.json", ".documents.json.fingerprint", "keep.arrow"]
    for words, told in ((("--dry-run",), "would remove"), ((), "removed")):
        done = run_script("repair_results", *words)
        removed = [f"{told} results/e/{name}" for name in gone]
        assert done.stdout.splitlines()[2:5] == removed
    assert run_script("verify_results").stdout.endswith(": intact\n")
    for elsewhere in (place / "results", place / "none"):
        done = run_script("verify_results", elsewhere)
        assert done.returncode == 1 and "contains no results/" in done.stderr


def test_an_active_run_is_left_alone(place: Path) -> None:
    flip_byte(Path("results/e/keep.arrow"))
    EXPERT_LOCKS.mkdir(parents=True)
    with (EXPERT_LOCKS / "e.lock").open("a") as stream:
        assert flock(stream)
        assert verify() == []


def test_verifying_needs_no_write_permission(place: Path) -> None:
    EXPERT_LOCKS.mkdir(parents=True)
    # A running program cannot be opened for writing, not even by root.
    (EXPERT_LOCKS / "e.lock").symlink_to(Path(sys.executable).resolve())
    assert verify() == []


def test_it_ends_quietly_when_its_reader_does(place: Path) -> None:
    flip_byte(Path("results/e/keep.arrow"))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, SCRIPTS / "verify_results.py"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


# The owner of a damaged sidecar must be remade with it.
SPOILT = ("e/plan.json", "e/.model.json.fingerprint", "e/documents/s/000.json", "e/model.json")
WHOLE = ("e/.plan.json.fingerprint", "e/documents/s/.000.json.fingerprint")


def test_records_that_are_not_json_are_removed_unless_a_run_only_reads_or_another_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*SPOILT, *WHOLE):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"n": 1}\n')
    Path(SPOILT[0]).write_bytes(bytes(9))
    Path(SPOILT[1]).write_text("")
    Path(SPOILT[2]).write_text('{"n": ')
    Path("e/notes.json").write_text("of the user's own {")
    EXPERT_LOCKS.mkdir(parents=True)
    with (EXPERT_LOCKS / "e.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        remove_corrupt_records(tmp_path, looks=False)
    assert capsys.readouterr().err == ""
    remove_corrupt_records(tmp_path, looks=True)
    assert all(Path(name).exists() for name in SPOILT)
    assert capsys.readouterr().err.count("a run removes it") == len(SPOILT)
    remove_corrupt_records(tmp_path, looks=False)
    assert not any(Path(name).exists() for name in SPOILT)
    assert all(Path(name).exists() for name in (*WHOLE, "e/notes.json"))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(SPOILT)
    assert all(any(name in line for line in told) for name in SPOILT)


def test_a_file_deleted_by_hand_is_noted_and_made_again_after_a_repair(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_missing_files(Path("results"))
    assert capsys.readouterr().err == ""
    remove(Path("results/e/base_model"))
    # Snakemake removes the record of a failed job, with the job's files.
    for name in ("documents.json", "keep.arrow"):
        Path("results/e", name).unlink()
    note_missing_files(Path("results"))
    told = capsys.readouterr().err
    assert told.startswith("note: results/e/base_model/") and told.count("\n") == 1
    assert " and 1 more files are gone" in told and "make repair" in told
    run_repair()
    note_missing_files(Path("results"))
    assert capsys.readouterr().err == ""


def test_read_only_runs_are_recognized_by_their_options() -> None:
    for words in ("--summary", "-S", "--dag", "--report=r.html"):
        assert only_looks([words], dryrun=False)
    for words in ("--cores 2 results/e/report.json", "--report r.html --report-after-run"):
        assert not only_looks(words.split(), dryrun=False)
        assert only_looks(words.split(), dryrun=True)
