"""Room for a copy: what goes when it is short, and what never does."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_content import make_rows, make_store, store_at

from expertflow.stage import make, store
from expertflow.stage.content import Content
from expertflow.stage.make import ensure_staged
from expertflow.stage.store import MARKER, PLANNED, NotStaged, Store, open_store

GIB = 1 << 30


@pytest.fixture(autouse=True)
def another_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "can_share", lambda *_: False)


@pytest.fixture
def three(tmp_path: Path) -> list[Content]:
    return [make_rows(tmp_path / name, fill=name.encode()) for name in "abc"]


def quota_for(contents: list[Content]) -> float:
    return (sum(content.n_bytes for content in contents) + 100) / GIB


def used_at(place: Store, content: Content, second: float) -> None:
    os.utime(place.root / content.key / MARKER, (second, second))


def test_the_copy_least_recently_used_goes_first(tmp_path: Path, three: list[Content]) -> None:
    a, b, c = three
    place = make_store(tmp_path / "scratch", quota_gib=quota_for([a, b]))
    for content, second in ((a, 200.0), (b, 100.0)):
        ensure_staged(content, place).hold.close()
        used_at(place, content, second)
    ensure_staged(c, place)
    assert [place.find(content.key) is not None for content in three] == [True, False, True]


def test_using_a_copy_makes_it_recent(tmp_path: Path, three: list[Content]) -> None:
    a, b, c = three
    place = make_store(tmp_path / "scratch", quota_gib=quota_for([a, b]))
    for content in (a, b):
        ensure_staged(content, place).hold.close()
        used_at(place, content, 100.0 if content is a else 200.0)
    ensure_staged(a, place).hold.close()
    ensure_staged(c, place)
    assert [place.find(content.key) is not None for content in three] == [True, False, True]


def test_a_copy_that_is_read_is_never_removed(tmp_path: Path, three: list[Content]) -> None:
    a, b, c = three
    place = make_store(tmp_path / "scratch", quota_gib=quota_for([a, b]))
    held = ensure_staged(a, place)
    used_at(place, a, 100.0)
    ensure_staged(b, place).hold.close()
    ensure_staged(c, place)
    assert [place.find(content.key) is not None for content in three] == [True, False, True]
    assert held.folder.is_dir()


def test_with_everything_in_use_the_quota_says_no(tmp_path: Path, three: list[Content]) -> None:
    a, b, c = three
    place = make_store(tmp_path / "scratch", quota_gib=quota_for([a, b]))
    holds = [ensure_staged(content, place) for content in (a, b)]
    with pytest.raises(NotStaged, match=r"are in use, .* the quota is"):
        ensure_staged(c, place)
    assert len(holds) == 2


def test_what_exceeds_the_quota_alone_removes_nothing(tmp_path: Path, three: list[Content]) -> None:
    a, b, _ = three
    ensure_staged(a, make_store(tmp_path / "scratch")).hold.close()
    place = make_store(tmp_path / "scratch", quota_gib=100 / GIB)
    with pytest.raises(NotStaged, match="more than the quota"):
        ensure_staged(b, place)
    assert place.find(a.key) is not None


def fake_free(n_bytes: int) -> Callable[[Path], Any]:
    return lambda _: shutil._ntuple_diskusage(10 * n_bytes, 9 * n_bytes, n_bytes)


def test_a_copy_needs_a_tenth_more_than_its_size(
    tmp_path: Path, three: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, needed = make_store(tmp_path / "scratch"), three[0].n_bytes
    monkeypatch.setattr(store.shutil, "disk_usage", fake_free(int(needed * 1.1) - 1))
    with pytest.raises(NotStaged, match=r"free, .* needed"):
        ensure_staged(three[0], place)
    monkeypatch.setattr(store.shutil, "disk_usage", fake_free(int(needed * 1.1) + 1))
    assert ensure_staged(three[0], place).origin == "copied"


def test_copies_that_nobody_reads_go_when_the_disk_is_full(
    tmp_path: Path, three: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = three
    place = make_store(tmp_path / "scratch")
    ensure_staged(a, place).hold.close()
    free = {True: b.n_bytes // 2, False: 10 * b.n_bytes}
    monkeypatch.setattr(
        store.shutil, "disk_usage", lambda _: fake_free(free[place.find(a.key) is not None])(_)
    )
    ensure_staged(b, place)
    assert place.find(a.key) is None


def test_nothing_is_removed_in_vain(
    tmp_path: Path, three: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = three
    place = make_store(tmp_path / "scratch", quota_gib=quota_for([a, b]))
    ensure_staged(a, place).hold.close()
    held = ensure_staged(b, place)
    big = make_rows(tmp_path / "big", n_bytes=a.n_bytes + 500)
    with pytest.raises(NotStaged, match=r"0\.00 GB in .* are in use"):
        ensure_staged(big, place)
    assert place.find(a.key) is not None, "for the quota"
    monkeypatch.setattr(store.shutil, "disk_usage", fake_free(0))
    with pytest.raises(NotStaged, match="counting copies that nobody reads"):
        ensure_staged(big, replace(place, quota_bytes=None))
    assert place.find(a.key) is not None, "for the disk"
    held.hold.close()


def test_removing_what_is_linked_to_elsewhere_frees_nothing(
    tmp_path: Path, three: list[Content]
) -> None:
    a, b, _ = three
    place = make_store(tmp_path / "scratch")
    for content in (a, b):
        ensure_staged(content, place).hold.close()
    for number, path in enumerate(sorted(place.files(a.key).rglob("*.*"))):
        os.link(path, tmp_path / f"{number}")
    marker = (place.root / a.key / MARKER).stat().st_size
    assert store._size(place.root / a.key) == marker
    assert store._size(place.root / b.key) >= b.n_bytes


def test_a_copy_that_another_process_removes_meanwhile_does_no_harm(
    tmp_path: Path, three: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = three
    place = make_store(tmp_path / "scratch", quota_gib=quota_for([b]))
    ensure_staged(a, place).hold.close()
    marker, listed = place.root / a.key / MARKER, Store._oldest_first

    def meanwhile(self: Store, key: str) -> list[str]:
        shutil.rmtree(marker.parent)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "glob", lambda *_: iter([marker]))
            return listed(self, key)

    monkeypatch.setattr(Store, "_oldest_first", meanwhile)
    assert ensure_staged(b, place).origin in ("copied", "linked")


def test_a_copy_is_counted_all_the_while_it_is_put_in_its_place(
    tmp_path: Path, three: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = three[0]
    place = make_store(tmp_path / "scratch")
    is_free: list[bool] = []
    mark = store.write_record

    def look(path: Path, record: Any) -> None:
        with (place.root / ".store.lock").open("a") as stream:
            is_free.append(store._try_lock(stream, fcntl.LOCK_EX))
        mark(path, record)

    monkeypatch.setattr(store, "write_record", look)
    ensure_staged(a, place)
    assert is_free == [False]


def test_what_another_copy_will_take_is_not_free(
    tmp_path: Path, three: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = three
    place = make_store(tmp_path / "scratch")
    with place.looking(a.key):
        place.begin(a.key, a.n_bytes)
        monkeypatch.setattr(store.shutil, "disk_usage", fake_free(a.n_bytes + b.n_bytes))
        with pytest.raises(NotStaged):
            ensure_staged(b, place)
        assert place.partial(a.key).is_dir(), "whoever makes it is alive"


def test_what_dead_processes_left_is_removed(tmp_path: Path, three: list[Content]) -> None:
    a, b, c = three
    place = make_store(tmp_path / "scratch")
    (place.partial(a.key) / "files").mkdir(parents=True)
    (place.partial(a.key) / PLANNED).write_text(json.dumps({"n_bytes": 1 << 60}))
    (place.files(b.key)).mkdir(parents=True)
    ensure_staged(c, place)
    assert sorted(path.name for path in place.root.glob("[!.]*")) == [c.key]
    assert not list(place.root.glob(".*.partial"))


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_store_that_others_may_write_to_is_not_trusted(tmp_path: Path, mode: int) -> None:
    store_at(tmp_path).mkdir()
    store_at(tmp_path).chmod(mode)
    with pytest.raises(NotStaged, match="you alone may write to"):
        open_store(tmp_path, None)


def test_a_store_that_is_a_link_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    store_at(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotStaged):
        open_store(tmp_path, None)


def test_each_user_of_a_disk_has_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = open_store(tmp_path, None).root
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    assert store_at(tmp_path) != own
    store_at(tmp_path).mkdir(mode=0o700)
    monkeypatch.setattr(Path, "lstat", lambda path: owned_by(os.geteuid(), os.lstat(path)))
    assert open_store(tmp_path, None).root == store_at(tmp_path)


def owned_by(user: int, found: os.stat_result) -> os.stat_result:
    return os.stat_result((*found[:4], user, *found[5:]))


def test_a_store_is_made_for_its_owner_only(tmp_path: Path) -> None:
    assert open_store(tmp_path, None).root.stat().st_mode & 0o777 == 0o700
