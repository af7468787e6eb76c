"""A finished state is published as long as it is what was written, and ended once more if not."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import made, train

from expertflow.train.publish import LOGS, read_outcome, write_outcome
from expertflow.train.records import RunSummary


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return train(made(tmp_path_factory.mktemp("run"), n_steps=2))


@pytest.fixture
def state(tmp_path: Path, summary: RunSummary) -> Path:
    (tmp_path / "final" / "deep").mkdir(parents=True)
    for name in ("final/model.safetensors", "final/deep/config.json", *LOGS):
        (tmp_path / name).write_text(f"what is in {name}")
    write_outcome(tmp_path, summary)
    return tmp_path


def test_a_whole_state_gives_what_was_noted(state: Path, summary: RunSummary) -> None:
    assert read_outcome(state) == summary


def cut_outcome(state: Path) -> str:
    (state / "outcome.json").write_text('{"n_steps": ')
    return "outcome.json cannot be read"


def empty_outcome(state: Path) -> str:
    (state / "outcome.json").write_bytes(bytes(40))
    return "outcome.json cannot be read"


def zero_model(state: Path) -> str:
    path = state / "final" / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    return "final/model.safetensors does not hold what was written"


def lose_config(state: Path) -> str:
    (state / "final" / "deep" / "config.json").unlink()
    return "final/deep/config.json is missing"


def cut_log(state: Path) -> str:
    (state / "steps.jsonl").write_text("wh")
    return "steps.jsonl has 2 bytes"


@pytest.mark.parametrize("spoil", [cut_outcome, empty_outcome, zero_model, lose_config, cut_log])
def test_a_damaged_one_gives_nothing_and_says_why(
    state: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    why = spoil(state)
    with caplog.at_level(logging.WARNING):
        assert read_outcome(state) is None
    assert why in caplog.text and "ended once more from its last checkpoint" in caplog.text


def test_a_state_without_an_end_gives_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_outcome(tmp_path) is None and not caplog.records
