"""The store of tokens: made once, whole or not, shared, and let go."""

import os
from pathlib import Path

import pytest

from expertflow.tokens.store import ABANDONED_S, ensure_stored, prunable, publish


def fill(folder: Path) -> None:
    (folder / "ids").write_bytes(b"123")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def failing(folder: Path) -> None:
        fill(folder)
        raise ValueError

    with pytest.raises(ValueError):
        ensure_stored(tmp_path, "k", failing)
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_make_the_same_the_first_to_end_is_taken(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        fill(folder)
        other = tmp_path / "k"
        other.mkdir()
        (other / "ids").write_bytes(b"first")

    folder, _ = ensure_stored(tmp_path, "k", slow)
    assert (folder / "ids").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [folder]


def make_old(*paths: Path) -> None:
    for path in paths:
        old = path.stat().st_mtime - ABANDONED_S - 1
        os.utime(path, (old, old))


def test_a_result_shares_the_bytes_and_outlives_the_store(tmp_path: Path) -> None:
    folder, _ = ensure_stored(tmp_path / "store", "k", fill)
    result = tmp_path / "results" / "a.ids"
    # What was just stored may be about to be linked.
    assert prunable(tmp_path / "store") == []
    for _ in range(2):
        publish(folder / "ids", result)
        assert result.stat().st_ino == (folder / "ids").stat().st_ino
    make_old(folder / "ids", folder)
    assert prunable(tmp_path / "store") == []
    result.unlink()
    assert prunable(tmp_path / "store") == [folder]


def test_what_a_killed_job_left_is_pruned_later(tmp_path: Path) -> None:
    partial = tmp_path / ".k.123.partial"
    partial.mkdir()
    fill(partial)
    assert prunable(tmp_path) == []
    make_old(partial)
    # Its file was written to just now.
    assert prunable(tmp_path) == []
    make_old(partial / "ids", partial)
    assert prunable(tmp_path) == [partial]
    assert prunable(tmp_path / "nothing") == []
