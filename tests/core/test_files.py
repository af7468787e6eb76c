"""Files are written completely or not at all, locked by one process, and read as records."""

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.core import files
from expertflow.core.disk import MAKE_ROOM, DiskFullError, check_space, describe_os_error
from expertflow.core.errors import DataError, HardwareError
from expertflow.core.files import (
    hold_partial,
    is_abandoned,
    remove,
    replacing,
    sha256_directory,
    write_text,
)
from expertflow.core.locks import NO_LOCKS, try_lock
from expertflow.core.records import Record, from_json, read_part
from expertflow.train.saved.checkpoint_files import find_abandoned


def test_a_file_that_a_library_writes_for_its_owner_is_as_readable_as_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "neighbor").touch()
    for path in ("file", "folder"):
        with replacing(tmp_path / path) as partial:
            weights = partial if path == "file" else partial / "weights"
            weights.parent.mkdir(exist_ok=True)
            os.close(os.open(weights, os.O_CREAT | os.O_WRONLY, 0o600))
    modes = {(tmp_path / p).stat().st_mode for p in ("neighbor", "file", "folder/weights")}
    assert len(modes) == 1


def test_a_device_or_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_a_kill_leaves_no_half_of_a_folder_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, removed = tmp_path / "folder", list[Path]()
    monkeypatch.setattr(files, "remove", removed.append)
    for name in ("old", "new"):
        with replacing(target) as partial:
            partial.mkdir()
            (partial / name).touch()
    assert [path.name for path in target.iterdir()] == ["new"] and target not in removed
    assert [path.name for path in (removed[-1] / ".old").iterdir()] == ["old"]


WRITE = """
import os, sys
from pathlib import Path
from expertflow.core.files import replacing
with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    print("writes", flush=True)
    sys.stdin.read()
"""


def start_writing(target: Path) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", WRITE, str(target)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert process.stdout and process.stdout.readline() == "writes\n"
    return process


def test_files_moved_by_another_process_meanwhile_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, moved = tmp_path / "folder", tmp_path / "folder/file"
    folder.mkdir()
    moved.touch()
    list_folder = os.scandir

    def then_move(path: Any) -> Any:
        entries = list_folder(path)
        moved.rename(tmp_path / "elsewhere")
        return entries

    monkeypatch.setattr(os, "scandir", then_move)
    remove(folder)
    assert not folder.exists()
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    remove(folder)


def test_the_next_write_removes_leftovers_of_dead_processes_only(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    with start_writing(target) as living:
        with start_writing(target) as dead, start_writing(tmp_path / "other.txt") as other:
            dead.kill()
            other.kill()
        assert len(list(tmp_path.rglob("out.txt"))) == 2
        write_text(target, "whole")
        assert len(list(tmp_path.rglob("out.txt"))) == 2
        [left] = find_abandoned(tmp_path)
        assert left.name.startswith(".other.txt.")
        living.communicate()
    assert [path.name for path in tmp_path.rglob("out.txt")] == ["out.txt"]
    assert target.read_text() == "half"


def test_without_a_lock_a_partial_is_abandoned_after_an_hour(tmp_path: Path) -> None:
    left = tmp_path / ".out.txt.123.partial"
    left.mkdir()
    (left / "half").touch()
    for path in (left, left / "half"):
        assert not is_abandoned(left)
        os.utime(path, (0, 0))
    assert is_abandoned(left)


def test_a_partial_stays_while_a_child_has_its_lock(tmp_path: Path) -> None:
    with hold_partial(tmp_path / "out.txt") as (partial, lock):
        child = subprocess.Popen(["cat"], pass_fds=[lock.fileno()], stdin=subprocess.PIPE)
        partial.parent.rename(left := tmp_path / ".out.txt.left.partial")
    assert not is_abandoned(left)
    child.communicate()
    assert is_abandoned(left)


def test_directory_hashes_see_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    first = sha256_directory(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert sha256_directory(tmp_path) != first


@pytest.mark.parametrize("number", [*NO_LOCKS, errno.EIO])
def test_a_file_system_without_locks_is_reported_and_other_errors_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no luck")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as stream, caplog.at_level(logging.WARNING):
        if number == errno.EIO:
            with pytest.raises(OSError, match="no luck"):
                try_lock(stream)
        else:
            assert try_lock(stream) == "no locks"
            assert f"{tmp_path / 'lock'}: this file system has no locks" in caplog.text


class Inner(Record, frozen=True, kw_only=True):
    n: int


class Outer(Record, frozen=True, kw_only=True):
    inner: Inner


def test_an_invalid_record_is_rejected_with_its_key() -> None:
    for value, kind in (("1", "str"), (True, "bool")):
        with pytest.raises(DataError, match=rf"r\.json\.inner\.n: expected int, got {kind}"):
            from_json(Outer, {"inner": {"n": value}}, where="r.json")


def test_a_part_of_a_damaged_record_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(DataError, match=r"record\.json: "):
        read_part(int, path, "n")
    for spoilt in (b"", bytes(9), b'{"n": '):
        path.write_bytes(spoilt)
        with pytest.raises(DataError, match=r"record\.json: "):
            read_part(int, path, "n")


def test_files_on_one_disk_must_fit_there_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=5_000_000, total=9_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    needs = [(tmp_path / "state", 3e6, "4 checkpoints"), (tmp_path / "a" / "b", 2e6, "the model")]
    check_space(needs, fix="free some")
    with pytest.raises(HardwareError) as caught:
        check_space([*needs, (tmp_path, 7, "a bundle")], fix="free some")
    assert str(caught.value).startswith(f"{tmp_path / 'state'}: file system /")
    assert str(caught.value).endswith(
        " has 5.0 MB free, 5.0 MB needed for 4 checkpoints and the model and a bundle; free some"
    )
    # As a file system in user space that does not know its size.
    usage.free = usage.total = 0
    check_space(needs)


def test_a_full_disk_is_named_with_bytes_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    write_text(tmp_path / "rows", "old")
    for error, line in (
        (OSError(errno.ENOSPC, "full"), "no space left on device, more than 5.1 MB needed; file"),
        (OSError("in Rust (os error 122)"), "disk quota exceeded, more than 100.0 kB needed; file"),
        (ValueError("too long (os error 27)"), "file too large, more than 100.0 kB needed; file"),
        (ValueError("in Rust (os error 5)"), None),
    ):
        with pytest.raises(type(error) if line is None else DiskFullError) as caught:
            with replacing(tmp_path / "rows") as partial:
                partial.write_bytes(bytes(100_000))
                raise error
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"rows": "old"}
        if line is not None:
            assert isinstance(caught.value, OSError)
            told = describe_os_error(caught.value) or ""
            assert told.startswith(f"{tmp_path / 'rows'}: {line} system /")
            assert told.endswith(f" has 5.1 MB free; {MAKE_ROOM}")
