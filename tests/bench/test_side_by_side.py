"""One command, three parts: what is asked for, what fails, and that the last line is JSON."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "peers"))

import side_by_side
from measured import Failed
from side_by_side import finished, parsed, run_parts, tokens, trl, versions_differ


def program(path: Path, text: str) -> Path:
    """Write something that can be run in a Python's place."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_all_parts_are_measured_unless_some_are_named() -> None:
    assert parsed([]).parts == ["tokens", "training", "orchestration"]
    assert parsed(["--only", "orchestration,training"]).parts == ["orchestration", "training"]


@pytest.mark.parametrize(
    "words",
    [["--only", "tokens,speed"], ["--methods", "dora"], ["--repeats", "0"], ["--device", "tpu"]],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert words[1].split(",")[-1] in capsys.readouterr().err or words[0] == "--repeats"


def test_a_part_that_fails_is_listed_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def breaks(_: Namespace) -> dict[str, Any]:
        raise Failed("our_steps ended with 1:\nno room")

    parts = {"first": breaks, "second": lambda _: {"value": 1}}
    results = run_parts(["first", "second"], parts, Namespace())
    assert results == {
        "first": {"failed": "our_steps ended with 1: no room"},
        "second": {"value": 1},
    }
    assert finished({"parts": results}, tmp_path / "result.json") == 1
    out = capsys.readouterr().out.splitlines()
    assert "first: failed: our_steps ended with 1: no room" in out
    assert json.loads(out[-1]) == json.loads((tmp_path / "result.json").read_text())


def test_a_fault_of_the_benchmark_is_not_taken_for_a_result() -> None:
    def wrong(_: Namespace) -> dict[str, Any]:
        raise KeyError("a slip")

    with pytest.raises(KeyError):
        run_parts(["part"], {"part": wrong}, Namespace())


def test_nothing_failed_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert finished({"parts": {"tokens": {}}}, None) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"parts": {"tokens": {}}}


def test_a_python_without_the_peer_says_why(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "echo \"No module named 'trl'\" >&2; exit 1")
    args = parsed(["--peer-python", str(python)])
    assert trl(args) == (python, f"{python}: No module named 'trl'", {})
    args = parsed(["--peer-python", str(tmp_path / "none")])
    assert "cannot be run" in str(trl(args)[1])


def test_a_python_with_the_peer_tells_its_versions(tmp_path: Path) -> None:
    python = program(tmp_path / "python", 'echo noise; echo \'{"trl": "1.2"}\'')
    assert trl(parsed(["--peer-python", str(python)])) == (python, None, {"trl": "1.2"})


def test_an_environment_that_cannot_be_built_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def environment(name: str, directory: Path) -> Namespace:
        asked.append((name, directory))
        return Namespace(python=Path("p"), problem="ERROR: no torch for this machine")

    monkeypatch.setattr(side_by_side, "environment", environment)
    args = parsed(["--environments", str(tmp_path), "--device", "cuda"])
    assert trl(args) == (None, "not installed: ERROR: no torch for this machine", {})
    # Liger's kernels come with the environment for a card.
    assert asked == [("trl_cuda", tmp_path)]


def test_each_part_is_written_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_: Namespace) -> dict[str, Any]:
        raise KeyError("a slip")

    output = tmp_path / "result.json"
    parts = {"tokens": lambda _: {"value": 1}, "training": wrong}
    monkeypatch.setattr(side_by_side, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["s", "--output", str(output)])
    with pytest.raises(KeyError):
        side_by_side.main()
    written = json.loads(output.read_text())
    assert (written["parts"], written["not_run"]) == ({"tokens": {"value": 1}}, ["training"])


def test_what_a_childs_broken_answer_raises_is_a_failed_part() -> None:
    results = run_parts(["part"], {"part": lambda _: json.loads("{")}, Namespace())
    assert "Expecting" in results["part"]["failed"]


def test_other_versions_of_what_both_run_on_are_told() -> None:
    ours = {"torch": "2.13.0", "transformers": "5", "peft": "1", "accelerate": "1", "numpy": "2"}
    assert versions_differ(ours, ours) == {}
    assert versions_differ(ours, {}) is None
    theirs = {**ours, "torch": "2.12.0", "numpy": "3"}
    assert versions_differ(ours, theirs) == {"torch": ("2.13.0", "2.12.0")}


def test_without_the_real_data_the_tokens_part_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tokenise_pack

    monkeypatch.setattr(tokenise_pack, "missing", lambda _: "the real data is not here")
    results = run_parts(["tokens"], {"tokens": tokens}, parsed([]))
    assert results == {"tokens": {"failed": "the real data is not here"}}


def test_the_environments_for_cpu_and_card_differ_by_liger_alone() -> None:
    folder = ROOT / "bench" / "peers" / "requirements"
    pins = [
        {line for line in (folder / name).read_text().splitlines() if not line.startswith("#")}
        for name in ("trl_peft.txt", "trl_cuda.txt")
    ]
    assert {pin.partition("==")[0] for pin in pins[1] - pins[0]} == {"liger-kernel"}
    assert not pins[0] - pins[1]
