"""A copy is made once, verified, and remade when it has changed."""

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_content import is_copy, make_model, make_rows, make_store, store_at

from expertflow.core.errors import DataError, HardwareError
from expertflow.staging import store
from expertflow.staging.content import Content
from expertflow.staging.store import MARKER, ensure_staged, open_store, prune_copies

FORK = multiprocessing.get_context("fork")
ROWS = "train/data-00000-of-00001.arrow"


@pytest.fixture
def rows(tmp_path: Path) -> Content:
    return make_rows(tmp_path / "packed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_store(tmp_path / "scratch")


def is_new(content: Content, root: Path) -> bool:
    """Stage content and release it; return whether a copy was made."""
    held = ensure_staged(content, root)
    held.hold.close()
    assert is_copy(content, held.folder)
    assert not list(root.glob(".*.partial"))
    return held.seconds is not None


def test_content_is_copied_once_and_found_again(rows: Content, root: Path) -> None:
    # A killed process left half of a copy, and all of one without its marker.
    (root / f".{rows.key}.x.partial").mkdir()
    for name in (".lock", ROWS.replace("/", "-")):
        (root / f".{rows.key}.x.partial" / name).touch()
    make_rows(root / rows.key / "files")
    assert is_new(rows, root)
    # Cleanup of old files sees that it is used.
    lock = root / f".{rows.key}.lock"
    os.utime(lock, (1, 1))
    assert not is_new(rows, root)
    assert lock.stat().st_mtime > 1
    marker = json.loads((root / rows.key / MARKER).read_text())
    assert [*marker["files"]] == [*rows.sizes]
    model = make_model(root.parent / "model")
    assert is_new(model, root)
    weights = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [*model.sizes] == ["config.json", *weights, "tokenizer.json"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


FILES = (f"files/{ROWS}", "files/held_out/state.json")
DAMAGES = [(name, damage) for name in FILES for damage in (flip_a_bit, truncate, Path.unlink)]
DAMAGES += [(MARKER, damage) for damage in (Path.unlink, write(""), write("{}"), write('{"id": 1'))]


def test_a_damaged_copy_is_remade(rows: Content, root: Path) -> None:
    assert is_new(rows, root)
    for name, damage in DAMAGES:
        damage(root / rows.key / name)
        assert is_new(rows, root)


def test_a_damaged_copy_in_use_stays(rows: Content, root: Path) -> None:
    reader = ensure_staged(rows, root)
    flip_a_bit(reader.folder / "train" / "state.json")
    with pytest.raises(HardwareError, match="another process is reading it"):
        ensure_staged(rows, root)
    assert reader.folder.is_dir()


def test_a_source_that_differs_from_its_key_is_never_marked(rows: Content, root: Path) -> None:
    flip_a_bit(rows.source / ROWS)
    with pytest.raises(DataError, match="run make repair"):
        ensure_staged(rows, root)
    assert [path.name for path in root.iterdir()] == [f".{rows.key}.lock"]


@pytest.mark.parametrize(
    ("name", "message"), [("_copy_file", "check the disk"), ("_make", "not completed 3 times")]
)
def test_a_disk_that_loses_bytes_is_not_trusted(
    rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    write = getattr(store, name)

    def lose_a_byte(*arguments: Any) -> Any:
        made = write(*arguments)
        if name == "_make":
            (root / rows.key / MARKER).unlink()
        else:
            truncate(arguments[1])
        return made

    monkeypatch.setattr(store, name, lose_a_byte)
    with pytest.raises(HardwareError, match=message):
        ensure_staged(rows, root)
    assert not list(root.glob(".*.partial"))


def test_copies_are_uncached(rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: set[tuple[object, ...]] = set()
    compare = store.hash_files

    def advise(file: int, *how: int) -> None:
        dropped.add((Path(f"/proc/self/fd/{file}").readlink(), *how))

    def look(folder: Path, names: list[str]) -> dict[str, str]:
        assert dropped == {(folder / n, 0, 0, os.POSIX_FADV_DONTNEED) for n in names}
        return compare(folder, names)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(store, "hash_files", look)
    ensure_staged(rows, root).hold.close()
    assert dropped


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


def test_a_copy_needs_free_space(
    rows: Content, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = int(rows.n_bytes * 1.1) - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free, total=1 << 40))
    with pytest.raises(HardwareError, match=r"free, .* needed for a copy of the rows; make prune"):
        ensure_staged(rows, root)
    free = rows.n_bytes * 2
    assert is_new(rows, root)


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


def test_a_store_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    root = open_store(tmp_path)
    assert root == store_at(tmp_path) and root.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o770):
        root.chmod(mode)
        with pytest.raises(HardwareError, match="only you can write to"):
            open_store(tmp_path)
    root.chmod(0o700)
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HardwareError, match="only you can write to"):
        open_store(tmp_path)
