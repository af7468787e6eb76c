"""Processes that stage at once: one copy for all, and nothing goes that is held."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import scale_staging
from scale_apart import Failed, apart

from expertflow.stage.store import Store


def test_of_processes_with_one_key_one_copies_and_all_get_it(tmp_path: Path) -> None:
    found = scale_staging.one_key(tmp_path, n_processes=8, n_bytes=2_000_000)
    assert found["n_copies"] == 1
    assert found["waited_s_max"] > 0


def test_keys_that_do_not_fit_together_give_way_but_not_while_they_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow disk a copy that is held may be long in the making.
    monkeypatch.setattr(scale_staging, "N_TRIES", 10_000)
    found = scale_staging.many_keys(tmp_path, n_processes=8, n_bytes=200_000, n_fit=3)
    assert found["n_held_copies_lost"] == 0
    assert found["n_evicted"] >= 5
    assert found["kept_bytes_max"] <= found["quota_bytes"]


def test_a_held_copy_that_is_removed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything: Callable[[Store, str], bool] = lambda *_: True  # noqa: E731
    monkeypatch.setattr(Store, "_is_idle", everything)

    def evict(store: Store, key: str) -> None:
        scale_staging.remove(store.root / key)

    monkeypatch.setattr(Store, "_evict", evict)
    with pytest.raises(Failed, match=r"held copies lost|processes failed"):
        scale_staging.many_keys(tmp_path, n_processes=6, n_bytes=200_000, n_fit=2)


def test_memory_is_counted_from_what_was_there_before() -> None:
    held = bytearray(50_000_000)
    took = apart(lambda: len(bytearray(b"x" * 30_000_000)))
    assert took.value == 30_000_000
    assert 25_000_000 < took.peak_bytes < 75_000_000
    assert len(held) == 50_000_000


def test_a_measured_process_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failed):
        apart(lambda: 1 // 0)
    assert "ZeroDivisionError" in capfd.readouterr().err
