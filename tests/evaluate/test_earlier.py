"""The history of evaluations."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from made_up_documents import example, spec

from expertflow.evaluate import earlier
from expertflow.evaluate.earlier import PastRun, append_run, compare_runs, make_run, read_runs
from expertflow.evaluate.records import Decoding, EarlierRun, GenerationSpec, Judgment

HOW, SCORER = spec(), {"python": "3.12.1", "code": "0a"}


def run(
    weights: str,
    correct: str,
    *,
    first: int = 0,
    how: GenerationSpec = HOW,
    metric: str = "m",
    scorer: dict[str, str] = SCORER,
) -> PastRun:
    """Return an evaluation starting at question ``first``, with an x for each right answer."""
    examples = [example(i, f"q{first + i}", "r") for i in range(len(correct))]
    verdicts = [Judgment("correct" if c == "x" else "wrong") for c in correct]
    return make_run(how, metric, weights, examples, verdicts, scorer)


def compare(now: PastRun, path: Path, n_groups: int = 1000) -> EarlierRun | None:
    groups = {key: i % n_groups for i, key in enumerate(now.correct)}
    return compare_runs(now, path, seed=0, groups=groups)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "not there yet" / "e.jsonl"


def test_a_regression_is_reported_on_shared_questions(path: Path) -> None:
    append_run(run("a", "x" * 30), path)
    found = compare(run("b", "x" * 10 + "." * 20, first=10), path)
    assert found is not None and found.change is not None
    assert (found.weights_sha256, found.n_shared_questions) == ("a", 20)
    assert found.value_fraction == 1.0
    assert found.change.difference == pytest.approx(-0.5)
    assert found.change.change == "worse"
    # Five differing groups prove nothing.
    few = compare(run("b", "." * 30), path, n_groups=5)
    assert few is not None and few.change is not None
    assert few.change.change == "no measurable change"


def test_the_newest_with_the_same_questions_counts(path: Path) -> None:
    append_run(run("old", "x."), path)
    append_run(run("new", "..", first=50), path)
    found = compare(run("now", "xx"), path)
    assert found is not None and (found.weights_sha256, found.n_shared_questions) == ("old", 2)
    unlike = compare(run("now", "x", first=90), path)
    assert unlike is not None and unlike.weights_sha256 == "new"
    assert (unlike.n_shared_questions, unlike.value_fraction, unlike.change) == (0, None, None)


def test_other_questions_and_the_same_weights_are_not_compared(path: Path) -> None:
    append_run(run("a", "x"), path)
    changes: list[dict[str, Any]] = [
        {"task": "final_answer"}, {"max_new_tokens": 9}, {"decoding": Decoding(stop=(";",))},
        {"fields": {"schema": "form"}}, {"artifacts": {"folder": str(path.parent)}},
    ]  # fmt: skip
    others = [run("b", "x", how=spec(**change)) for change in changes]
    others += [run("b", "x", scorer=SCORER | {"code": "0b"}), run("b", "x", metric="other")]
    for other in (*others, run("a", "x")):
        assert compare(other, path) is None
    # An artifact is identified by its content, which an entry changes here.
    append_run(run("c", "x", how=spec(artifacts={"database": str(path)})), path)
    assert compare(run("d", "x", how=spec(artifacts={"database": str(path)})), path) is None
    append_run(run("b", "x"), path)
    append_run(run("b", "x"), path)
    found = compare(run("b", "x"), path)
    assert found is not None and found.weights_sha256 == "a"
    assert [before.weights_sha256 for before in read_runs(path)] == ["a", "c", "b"]


def test_damaged_lines_are_dropped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append_run(run("a", "x"), path)
    lines = [b'{"evaluated_at": "20', b"[]", b"\x00\x00", b'{"weights_sha256": "a"}', b"\xff"]
    with path.open("ab") as stream:
        stream.writelines(line + b"\n" for line in lines)
    append_run(run("b", "x"), path)
    assert all(f"{path}: line {n} was skipped" in caplog.text for n in range(2, 7))
    caplog.clear()
    assert [before.weights_sha256 for before in read_runs(path)] == ["a", "b"] and not caplog.text


def test_a_records_fields_for_the_scorer_are_part_of_its_question(path: Path) -> None:
    how = spec(fields={"tests": "checks"})

    def graded(weights: str, tests: str) -> PastRun:
        asked = example(0, "q", "r", checks=tests, unread=weights)
        return make_run(how, "m", weights, [asked], [Judgment("correct")], SCORER)

    append_run(graded("a", "assert(1)"), path)
    for tests, n_shared in (("assert(1)", 1), ("assert(2)", 0)):
        found = compare(graded("b", tests), path)
        assert found is not None and found.n_shared_questions == n_shared


def test_the_newest_fifty_are_kept(path: Path) -> None:
    for i in range(earlier.N_KEPT + 3):
        append_run(run(f"w{i}", "x"), path)
    kept = read_runs(path)
    assert (len(kept), kept[0].weights_sha256) == (earlier.N_KEPT, "w3")


def test_two_at_once_lose_nothing(path: Path) -> None:
    def note_some(name: str) -> None:
        for i in range(8):
            append_run(run(f"{name}{i}", "x"), path)

    # Each thread opens the lock itself, so they exclude each other like processes.
    with ThreadPoolExecutor(2) as writers:
        for written in [writers.submit(note_some, name) for name in "ab"]:
            written.result(timeout=120)
    assert len(read_runs(path)) == 16
    # Only complete lines, and no temporary files.
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert sorted(file.name for file in path.parent.iterdir()) == ["e.jsonl", "e.lock"]


def test_an_unwritable_folder_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    append_run(run("a", "x"), tmp_path / "file" / "e.jsonl")
    assert "was not saved for later ones" in caplog.text
