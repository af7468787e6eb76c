"""A copy is made once, verified, and made again when it is no longer what it was."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_content import is_copy, make_model, make_rows, make_store, store_at

from expertflow.core.errors import DataError
from expertflow.staging import store
from expertflow.staging.content import Content
from expertflow.staging.store import (
    MARKER,
    NotStagedError,
    ensure_staged,
    open_store,
    prune_copies,
)

FORK = multiprocessing.get_context("fork")
ROWS = "train/data-00000-of-00001.arrow"


@pytest.fixture
def rows(tmp_path: Path) -> Content:
    return make_rows(tmp_path / "packed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_store(tmp_path / "scratch")


def is_new(content: Content, root: Path) -> bool:
    """Stage content and let go of it again; return whether a copy was made."""
    held = ensure_staged(content, root)
    held.hold.close()
    assert is_copy(content, held.folder)
    assert not list(root.glob(".*.partial"))
    return held.seconds is not None


def test_content_is_copied_once_and_found_again(rows: Content, root: Path) -> None:
    assert is_new(rows, root)
    assert not is_new(rows, root)
    marker = json.loads((root / rows.key / MARKER).read_text())
    assert {name: file["n_bytes"] for name, file in marker["files"].items()} == rows.sizes
    assert all(len(file["xxh3_128"]) == 32 for file in marker["files"].values())


def test_a_model_is_copied_without_what_is_not_read(tmp_path: Path, root: Path) -> None:
    copied = ensure_staged(make_model(tmp_path / "model"), root)
    assert sorted(path.name for path in copied.folder.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
@pytest.mark.parametrize("name", [ROWS, "held_out/state.json"])
def test_a_damaged_copy_is_made_again(
    rows: Content, root: Path, damage: Callable[[Path], None], name: str
) -> None:
    assert is_new(rows, root)
    damage(root / rows.key / "files" / name)
    assert is_new(rows, root)


@pytest.mark.parametrize("text", [None, "", "{}", '{"id": 1'])
def test_a_copy_needs_a_good_marker(rows: Content, root: Path, text: str | None) -> None:
    assert is_new(rows, root)
    marker = root / rows.key / MARKER
    marker.unlink()
    if text is not None:
        marker.write_text(text)
    assert is_new(rows, root)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_a_damaged_copy_in_use_stays(
    rows: Content, root: Path, damage: Callable[[Path], None]
) -> None:
    reader = ensure_staged(rows, root)
    damage(reader.folder / "train" / "state.json")
    with pytest.raises(NotStagedError, match="another process reads it"):
        ensure_staged(rows, root, patience_s=0.1)
    assert reader.folder.is_dir()


def test_a_source_that_is_not_what_its_key_says_is_never_marked(rows: Content, root: Path) -> None:
    flip_a_bit(rows.source / ROWS)
    with pytest.raises(DataError, match="run the stage that wrote them again"):
        ensure_staged(rows, root)
    assert [path.name for path in root.iterdir()] == [f".{rows.key}.lock"]


def test_a_copy_that_differs_is_none(
    rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = store._copy_file

    def lose_a_byte(source: Path, target: Path, stop: Any) -> Any:
        hashes = copy(source, target, stop)
        truncate(target)
        return hashes

    monkeypatch.setattr(store, "_copy_file", lose_a_byte)
    with pytest.raises(NotStagedError, match="check the disk"):
        ensure_staged(rows, root)
    assert not (root / rows.key).exists()


def test_a_bad_disk_is_not_trusted(
    rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = store._make

    def spoil(content: Content, where: Path) -> Any:
        marker = make(content, where)
        truncate(where / content.key / "files" / ROWS)
        return marker

    monkeypatch.setattr(store, "_make", spoil)
    with pytest.raises(NotStagedError, match="damaged 3 times in a row"):
        ensure_staged(rows, root)


def test_a_copy_is_read_from_the_disk(
    rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Path, str]] = []

    def note(call: str) -> Callable[..., None]:
        whole = getattr(os, call)

        def noted(file: int, *how: int) -> None:
            seen.append((Path(f"/proc/self/fd/{file}").readlink(), call))
            whole(file, *how)

        return noted

    for call in ("fsync", "posix_fadvise"):
        monkeypatch.setattr(os, call, note(call))
    compare = store.hash_files

    def look(folder: Path, names: list[str]) -> dict[str, str]:
        for name in names:
            calls = [call for file, call in seen if file == folder / name]
            assert calls == ["fsync", "posix_fadvise"], name
        return compare(folder, names)

    monkeypatch.setattr(store, "hash_files", look)
    assert is_new(rows, root)
    assert seen


def note_whether_new(content: Content, root: Path, start: Any, notes: Path) -> None:
    start.wait()
    held = ensure_staged(content, root)
    (notes / f"{os.getpid()}").write_text("found" if held.seconds is None else "made")
    assert is_copy(content, held.folder)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_one_of_many_processes_copies(tmp_path: Path, root: Path, *, is_damaged: bool) -> None:
    content, notes = make_rows(tmp_path / "big", n_bytes=20_000_000), tmp_path / "notes"
    notes.mkdir()
    if is_damaged:
        assert is_new(content, root)
        flip_a_bit(root / content.key / "files" / ROWS)
    arguments = (content, root, FORK.Barrier(8), notes)
    processes = [FORK.Process(target=note_whether_new, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert sorted(path.read_text() for path in notes.iterdir()) == ["found"] * 7 + ["made"]


def killed_at(number: int, content: Content, root: Path) -> bool:
    """Stage in a process that is killed at its n-th call to the system; tell whether it came to it.

    Python announces what touches files: opening, locking, linking, renaming, removing.
    """
    pid = os.fork()
    if pid == 0:
        seen = 0

        def count(event: str, _: object) -> None:
            nonlocal seen
            if event.split(".")[0] in ("open", "os", "fcntl", "shutil", "tempfile"):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            ensure_staged(content, root)
            os._exit(0)
        finally:
            # Whatever went wrong, no second process goes on with the tests.
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def test_a_kill_leaves_no_marker_without_its_files(rows: Content, tmp_path: Path) -> None:
    number, marked = 0, 0
    while True:
        number += 1
        root = make_store(tmp_path / f"scratch-{number}")
        if not killed_at(number, rows, root):
            break
        if (root / rows.key / MARKER).exists():
            marked += 1
            assert is_copy(rows, root / rows.key / "files")
        is_new(rows, root)
    assert number > 30, "the kills did not reach into the copy"
    assert marked > 0, "no kill came after the marker"


def test_a_copy_needs_some_room(rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, is_enough in ((int(rows.n_bytes * 1.1) - 1, False), (rows.n_bytes * 2, True)):
        usage = shutil._ntuple_diskusage(10 * free, 9 * free, free)
        monkeypatch.setattr(store.shutil, "disk_usage", lambda _, usage=usage: usage)
        if is_enough:
            assert is_new(rows, root)
        else:
            with pytest.raises(NotStagedError, match=r"free, .* needed; make prune"):
                ensure_staged(rows, root)


def test_prune_removes_copies_that_no_record_refers_to(tmp_path: Path, root: Path) -> None:
    kept, read, old = (make_rows(tmp_path / name, fill=name.encode()) for name in "abc")
    results = tmp_path / "results" / "e"
    results.mkdir(parents=True)
    for content in (kept, old):
        assert is_new(content, root)
    target = {"target": str(root / kept.key / "files")}
    staging = {"rows": target, "weights": {"target": None}}
    (results / "staging.json").write_text(json.dumps(staging))
    held = ensure_staged(read, root)
    (root / f".{kept.key}.partial").mkdir()
    expected = [root / f".{kept.key}.partial", root / old.key]
    assert sorted(prune_copies(results.parent, dry_run=True)) == expected
    assert sorted(prune_copies(results.parent)) == expected
    assert sorted(p.name for p in root.glob("[!.]*")) == sorted([kept.key, read.key])
    held.hold.close()
    assert prune_copies(results.parent) == [root / read.key]
    assert prune_copies(tmp_path / "none") == []


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_store_that_others_may_write_to_is_not_trusted(tmp_path: Path, mode: int) -> None:
    store_at(tmp_path).mkdir()
    store_at(tmp_path).chmod(mode)
    with pytest.raises(NotStagedError, match="you alone may write to"):
        open_store(tmp_path)
    store_at(tmp_path).rmdir()
    assert open_store(tmp_path).stat().st_mode & 0o777 == 0o700
    store_at(tmp_path).rename(tmp_path / "elsewhere")
    store_at(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotStagedError, match="you alone may write to"):
        open_store(tmp_path)
