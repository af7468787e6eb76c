"""A copy is made once, verified, and made again when it is no longer what it was."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_content import is_copy, make_model, make_rows, make_store

from expertflow.core.errors import DataError
from expertflow.stage import copy, make
from expertflow.stage.content import Content
from expertflow.stage.make import ensure_staged
from expertflow.stage.store import MARKER, NotStaged, Store

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def rows(tmp_path: Path) -> Content:
    return make_rows(tmp_path / "packed")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Give a store as on another disk: no bytes are shared with the source."""
    monkeypatch.setattr(make, "can_share", lambda *_: False)
    return make_store(tmp_path / "scratch")


def test_content_is_copied_once_and_found_again(rows: Content, store: Store) -> None:
    first = ensure_staged(rows, store)
    again = ensure_staged(rows, store)
    assert (first.origin, again.origin) == ("copied", "reused")
    assert is_copy(rows, first.folder)
    assert not list(store.root.glob(".*.partial"))


def test_a_model_is_copied_without_what_is_not_read(tmp_path: Path, store: Store) -> None:
    model = make_model(tmp_path / "model")
    copied = ensure_staged(model, store)
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
@pytest.mark.parametrize("name", ["train/data-00000-of-00001.arrow", "held_out/state.json"])
def test_a_damaged_copy_is_made_again(
    rows: Content, store: Store, damage: Callable[[Path], None], name: str
) -> None:
    first = ensure_staged(rows, store)
    first.hold.close()
    damage(first.folder / name)
    again = ensure_staged(rows, store)
    assert again.origin == "copied"
    assert is_copy(rows, again.folder)


@pytest.mark.parametrize("text", [None, "", "{}", '{"id": 1'])
def test_a_copy_without_a_good_marker_does_not_count(
    rows: Content, store: Store, text: str | None
) -> None:
    ensure_staged(rows, store).hold.close()
    marker = store.root / rows.key / MARKER
    marker.unlink()
    if text is not None:
        marker.write_text(text)
    assert ensure_staged(rows, store).origin == "copied"


def test_a_damaged_copy_that_is_read_stays(rows: Content, store: Store) -> None:
    reader = ensure_staged(rows, store)
    truncate(reader.folder / "train" / "state.json")
    with pytest.raises(NotStaged, match="another process reads it"):
        ensure_staged(rows, store, patience_s=0.1)
    assert reader.folder.is_dir()


def test_a_source_that_is_not_what_its_key_says_is_never_marked(
    rows: Content, store: Store
) -> None:
    flip_a_bit(rows.source / "train" / "data-00000-of-00001.arrow")
    with pytest.raises(DataError, match="run the stage that wrote them again"):
        ensure_staged(rows, store)
    assert store.find(rows.key) is None
    assert not list(store.root.glob("*/*")), "nothing is left of it"


def test_a_copy_that_differs_from_what_was_read_is_not_marked(
    rows: Content, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copy._write
    monkeypatch.setattr(copy, "_write", lambda file, chunk: whole(file, chunk[:5]))
    with pytest.raises(NotStaged, match="check the disk"):
        ensure_staged(rows, store)
    assert store.find(rows.key) is None


def test_a_copy_on_the_same_disk_shares_the_bytes(rows: Content, tmp_path: Path) -> None:
    store = make_store(tmp_path / "scratch")
    linked = ensure_staged(rows, store)
    assert linked.origin == "linked"
    assert is_copy(rows, linked.folder)
    assert store.find(rows.key).n_bytes == 0, "it takes nothing of the quota"  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [".probe", ".{key}.partial/probe"])
def test_what_a_killed_try_left_does_not_stop_the_next(
    rows: Content, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "scratch")
    left = store.root / at.format(key=rows.key)
    left.parent.mkdir(exist_ok=True)
    left.touch()
    tried: list[Path] = []
    try_it = make.can_share

    def note(file: Path, folder: Path) -> bool:
        tried.append(folder)
        return try_it(file, folder)

    monkeypatch.setattr(make, "can_share", note)
    assert ensure_staged(rows, store).origin == "linked"
    assert tried == [store.partial(rows.key)], "swept where its process is gone"
    assert not list(store.root.rglob("probe"))


def test_a_copy_is_compared_as_the_disk_has_it(
    rows: Content, store: Store, monkeypatch: pytest.MonkeyPatch
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
    compare = make.hash_files

    def look(folder: Path, names: list[str]) -> dict[str, str]:
        for name in names:
            calls = [call for file, call in seen if file == folder / name]
            assert calls == ["fsync", "posix_fadvise"], name
        return compare(folder, names)

    monkeypatch.setattr(make, "hash_files", look)
    assert ensure_staged(rows, store).origin == "copied"
    assert seen


def test_an_edit_in_place_of_a_linked_source_is_noticed(rows: Content, tmp_path: Path) -> None:
    store = make_store(tmp_path / "scratch")
    linked = ensure_staged(rows, store)
    name = "train/data-00000-of-00001.arrow"
    if not (linked.folder / name).samefile(rows.source / name):
        pytest.skip("this file system shares blocks and not files")
    linked.hold.close()
    flip_a_bit(rows.source / name)
    with pytest.raises(DataError):
        ensure_staged(rows, store)


def note_origin(content: Content, store: Store, start: float, notes: Path) -> None:
    time.sleep(max(0.0, start - time.time()))
    held = ensure_staged(content, store)
    (notes / f"{os.getpid()}").write_text(held.origin)
    assert is_copy(content, held.folder)


def test_of_many_processes_exactly_one_copies(tmp_path: Path, store: Store) -> None:
    content, notes = make_rows(tmp_path / "big", n_bytes=20_000_000), tmp_path / "notes"
    notes.mkdir()
    arguments = (content, store, time.time() + 0.5, notes)
    processes = [FORK.Process(target=note_origin, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert sorted(path.read_text() for path in notes.iterdir()) == ["copied"] + ["reused"] * 7


def test_processes_that_find_the_same_damage_copy_once(tmp_path: Path, store: Store) -> None:
    content, notes = make_rows(tmp_path / "big", n_bytes=20_000_000), tmp_path / "notes"
    notes.mkdir()
    first = ensure_staged(content, store)
    first.hold.close()
    flip_a_bit(first.folder / "train" / "data-00000-of-00001.arrow")
    arguments = (content, store, time.time() + 0.5, notes)
    processes = [FORK.Process(target=note_origin, args=arguments) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert sorted(path.read_text() for path in notes.iterdir()) == ["copied"] + ["reused"] * 5


def killed_at(number: int, content: Content, store: Store) -> bool:
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
            ensure_staged(content, store)
            os._exit(0)
        finally:
            # Whatever went wrong, no second process goes on with the tests.
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def test_a_kill_at_any_point_leaves_no_marker_without_whole_files(
    rows: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "can_share", lambda *_: False)
    number, marked = 0, 0
    while True:
        number += 1
        store = make_store(tmp_path / f"scratch-{number}")
        if not killed_at(number, rows, store):
            break
        if (store.root / rows.key / MARKER).exists():
            marked += 1
            assert is_copy(rows, store.files(rows.key))
        assert is_copy(rows, ensure_staged(rows, store).folder), number
        assert not list(store.root.glob(".*.partial")), number
    assert number > 30, "the kills did not reach into the copy"
    assert marked > 0, "no kill came after the marker"


def test_a_marker_lists_every_file_with_size_and_hash(rows: Content, store: Store) -> None:
    ensure_staged(rows, store)
    marker = json.loads((store.root / rows.key / MARKER).read_text())
    assert {name: file["n_bytes"] for name, file in marker["files"].items()} == rows.sizes
    assert all(len(file["xxh3_128"]) == 32 for file in marker["files"].values())
