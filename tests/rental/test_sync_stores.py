"""Whatever a store reports as stored is there, byte for byte; damage there is detected."""

import errno
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import Place, every_kind, fake_rsync, rsync, s3

from expertflow.core.errors import ConfigError
from expertflow.core.process import run_until
from expertflow.rental.sync import store as store_module
from expertflow.rental.sync import stores
from expertflow.rental.sync.store import SyncFailed, files_below
from expertflow.rental.sync.stores import S3Store, open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = tmp_path / "here"
    for name, content in (("a.json", b"{}"), ("in/b c.bin", bytes(range(256)) * 40), ("in/e", b"")):
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return here


@every_kind
def test_sent_files_come_back(place: Place, folder: Path, tmp_path: Path) -> None:
    store = place.open()
    sent = store.send_files(folder, "results/x", files_below(folder))
    assert (sent.n_files, sent.n_bytes) == (3, 2 + 10240) and sent.verified
    assert place.read("results/x/in/b c.bin") == (folder / "in/b c.bin").read_bytes()
    assert store.list_names("results") == ["x"]
    assert store.list_names("results/x") == ["a.json", "in"]
    assert store.list_names("nowhere") == store.list_names("results/x/a.json") == []
    store.fetch("results/x", tmp_path / "back")
    assert files_below(tmp_path / "back") == files_below(folder)
    assert (tmp_path / "back/in/b c.bin").read_bytes() == (folder / "in/b c.bin").read_bytes()
    store.fetch("results/x/a.json", tmp_path / "one")
    assert files_below(tmp_path / "one") == ["a.json"]
    with pytest.raises(store_module.NotThere):
        store.fetch("state/.guard/ledger.json", tmp_path / "back")
    # Dropping a file does not drop others with a similar name.
    store.send_files(folder, "results/x-more", ["a.json", "in/e"])
    store.delete("results/x")
    assert store.list_names("results/x") == []
    store.delete("results/x-more/a.json")
    assert store.list_names("results/x-more") == ["in"]


@every_kind
def test_existing_files_are_not_transferred_again_unless_damaged(
    place: Place, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SMALL_BYTES", 0)
    store = place.open()
    store.send_files(folder, "results", files_below(folder))
    (folder / "a.json").write_bytes(b"[1]")
    sent = store.send_files(folder, "results", files_below(folder))
    assert (sent.n_files, sent.n_bytes) == (3, 3)
    good = (folder / "in/b c.bin").read_bytes()
    place.write("results/in/b c.bin", b"x" + good[1:])
    if isinstance(store, stores.RsyncStore):
        # It first checks size and time, then compares, and trusts neither the next time.
        with pytest.raises(SyncFailed, match=r"differ from those here, for example in/b c\.bin"):
            store.send_files(folder, "results", files_below(folder))
    store.send_files(folder, "results", files_below(folder))
    assert place.read("results/in/b c.bin") == good
    # A copy can be interrupted either way.
    cancel = threading.Event()
    store = open_store(place.destination, cancel)
    cancel.set()
    with pytest.raises(SyncFailed, match="canceled"):
        store.fetch("results", tmp_path / "back")
    with pytest.raises(SyncFailed, match="canceled"):
        store.send_files(folder, "others", files_below(folder))


def test_canceling_ends_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, began = threading.Event(), tmp_path / "began"
    fake_rsync(tmp_path, f'touch "{began}"; exec sleep 600', monkeypatch)
    store = open_store("host:path", cancel)
    monkeypatch.setattr(cancel, "is_set", began.is_file)
    with pytest.raises(SyncFailed, match="canceled"):
        store.send_files(folder, "k", ["a.json"])


@s3
def test_large_objects_go_in_parts(place: Place, folder: Path) -> None:
    # The smallest part size that storage allows.
    store = S3Store(place.destination, threading.Event())
    store._chunk_bytes = 5 << 20
    content = bytes(range(256)) * (12 << 12)
    (folder / "big").write_bytes(content)
    assert store.send_files(folder, "k", ["big"]).n_bytes == len(content)
    assert place.read("k/big") == content
    assert store.send_files(folder, "k", ["big"]).n_bytes == 0
    place.write("k/big", b"x" + content[1:])
    assert store.send_files(folder, "k", ["big"]).n_bytes == len(content)
    assert place.read("k/big") == content


@s3
def test_folder_markers_are_not_files(place: Place, folder: Path, tmp_path: Path) -> None:
    place.open().send_files(folder, "state", ["a.json", "in/e"])
    for key in ("state/", "state/in/"):
        place.write(key, b"")
    assert place.open().list_names("state") == ["a.json", "in"]
    place.open().fetch("state", tmp_path / "back")
    assert files_below(tmp_path / "back") == ["a.json", "in/e"]


@s3
def test_impossible_settings_are_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDPOINT_URL", "minio:9000"), ("PROFILE", "nobody")):
        with monkeypatch.context() as changed:
            changed.setenv(f"AWS_{name}", value)
            with pytest.raises(ConfigError, match=f"{value}.*; see boto3's settings"):
                place.open()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="no credentials, such as AWS_ACCESS_KEY_ID"):
        place.open()


@s3
def test_storage_without_checksums_is_read_back(place: Place, folder: Path) -> None:
    from botocore.exceptions import ReadTimeoutError

    def break_off(_: int) -> bytes:
        raise ReadTimeoutError(endpoint_url="http://s3")

    store = S3Store(place.destination, threading.Event())
    head = store._client.head_object
    store._client.head_object = lambda **asked: {"ContentLength": head(**asked)["ContentLength"]}
    assert store.send_files(folder, "k", ["a.json"]).verified == "read back, sha256 matches"
    place.write("k/a.json", b"[]")
    assert store.send_files(folder, "k", ["a.json"]).n_bytes == 2
    assert place.read("k/a.json") == b"{}"
    # A connection that breaks meanwhile is one of our errors.
    store._client.get_object = lambda **_: {"Body": SimpleNamespace(read=break_off)}
    for name in ("a", "gone"):
        with pytest.raises(SyncFailed, match=rf"{name}\.json"):
            store.send_files(folder, "k", [f"{name}.json"])


def test_missing_programs_and_invalid_addresses_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for address in ("rsync://me:secret@host/m", "rsync://host/m?token=y"):
        assert open_store(address, threading.Event()).shown == "rsync://host/m"
    for wrong in ("", "s3://", "s3:///x", "gs://b/x", "s3:/b/x", "s3//b/x"):
        with pytest.raises(ConfigError, match=r"destination .* s3://bucket/prefix"):
            store_module.check_destination(wrong)
    for wrong in ("../x", "/etc/passwd", "a/../../b", ""):
        with pytest.raises(SyncFailed):
            store_module.check_key(wrong)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="rsync is not installed here"):
        open_store("host:path", threading.Event())
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"^s3://b/c: boto3 is not installed; run make s3"):
        open_store("s3://b/c", threading.Event())


@every_kind
def test_partials_in_linked_folders_are_not_sent(
    place: Place, folder: Path, tmp_path: Path
) -> None:
    (folder / ".x.1.partial").mkdir()
    (folder / ".x.1.partial" / "y").write_text("")
    assert files_below(folder) == ["a.json", "in/b c.bin", "in/e"]
    assert files_below(folder, skip=frozenset({"in"})) == ["a.json"]
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "w").write_text("weights")
    (folder / "in" / "linked").symlink_to(tmp_path / "far")
    place.open().send_files(folder, "results", files_below(folder))
    assert place.read("results/in/linked/w") == b"weights"


def test_unlistable_folders_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if str(path).endswith("/in"):
            raise OSError(errno.EIO, "no answer", str(path))
        return scandir(path)

    for name, target, problem in (
        ("in/up", folder, "up: a link to a folder that contains it"),
        ("broken", "nowhere", "broken: a dangling link"),
    ):
        (folder / name).symlink_to(target)
        with pytest.raises(SyncFailed, match=problem):
            files_below(folder)
        (folder / name).unlink()
    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(SyncFailed, match="in: cannot be listed: no answer"):
        files_below(folder)


@rsync
def test_a_small_file_that_changes_within_a_second_is_sent(place: Place, folder: Path) -> None:
    store = place.open()
    for content in (b"{}", b"[]"):
        (folder / "a.json").write_bytes(content)
        os.utime(folder / "a.json", (1, 1))
        assert store.send_files(folder, "k", ["a.json"]).n_bytes == 2
    assert place.read("k/a.json") == b"[]"


@rsync
@pytest.mark.parametrize("greeting", ["seq 400", r"printf '\374'"])
def test_a_greeting_of_the_remote_side_hides_nothing(
    place: Place, folder: Path, greeting: str
) -> None:
    shell = folder.parent / "shell"
    shell.write_text(shell.read_text().replace("shift\n", f"shift\n{greeting} >&2\n"))
    assert place.open().list_names("state") == []
    assert place.open().send_files(folder, "k", ["a.json"]).n_files == 1
    assert run_until(["printf", r"\374"], lambda: False).stdout == "\ufffd"
    shell.write_text(f"#!/bin/sh\n{greeting} >&2\necho Permission denied >&2\nexit 255\n")
    with pytest.raises(SyncFailed, match="denied; 'ssh elsewhere rsync --version' must"):
        place.open().list_names("state")


@every_kind
def test_odd_names_are_copied(
    place: Place, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a container: rsync considers no other characters printable.
    monkeypatch.setenv("LC_ALL", "C")
    odd = os.fsdecode(b"in/caf\xe9 \xc3\xa9")
    (folder / odd).write_bytes(b"odd")
    for name in ("#a", ";b"):
        (folder / name).write_bytes(b"1")
    store = place.open()
    sent = store.send_files(folder, "results", files_below(folder))
    assert (sent.n_files, sent.n_bytes) == (6, 2 + 10240 + 3 + 2)
    assert store.send_files(folder, "results", files_below(folder)).n_bytes == 0
    # Keys of object storage are UTF-8.
    name = odd if place.folder is not None else "in/caf\\xe9 \u00e9"
    assert place.read(f"results/{name}") == b"odd"
    assert place.read("results/#a") == place.read("results/;b") == b"1"
    assert Path(name).name in store.list_names("results/in")
    store.fetch("results", tmp_path / "back")
    assert (tmp_path / "back" / name).read_bytes() == b"odd"
