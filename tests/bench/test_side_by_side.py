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

from measured import Failed
from side_by_side import finished, parsed, run_parts


def program(path: Path, text: str) -> Path:
    """Write something that can be run in a Python's place."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


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


def test_the_environments_for_cpu_and_card_differ_by_liger_alone() -> None:
    folder = ROOT / "bench" / "peers" / "requirements"
    pins = [
        {line for line in (folder / name).read_text().splitlines() if not line.startswith("#")}
        for name in ("trl_peft.txt", "trl_cuda.txt")
    ]
    assert {pin.partition("==")[0] for pin in pins[1] - pins[0]} == {"liger-kernel"}
    assert not pins[0] - pins[1]
