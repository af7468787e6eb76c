"""The file of a bundle: one tar for one content, and nothing else is let in."""

import subprocess
import tarfile
from pathlib import Path

import pytest
from crafted_bundles import ITEMS, Forge, all_forgeries, index_of, make, start

from expertflow.core.errors import DataError, ExpertflowError
from expertflow.rental.bundle.tar import Items, read_bundle, read_index, write_bundle

LONG = "results/e/" + "a-long-folder/" * 20 + "naïve.json"
FORGERIES = all_forgeries()


@pytest.fixture
def items(tmp_path: Path) -> Items:
    (tmp_path / "rows").write_bytes(b"rows" * 300)
    return {**ITEMS, "results/e/rows.arrow": tmp_path / "rows", "results/e/empty": b"", LONG: b"{}"}


def test_members_come_out_as_they_went_in(tmp_path: Path, items: Items) -> None:
    assert start(tmp_path / "box", make(tmp_path / "b.tar", items))
    for name, content in items.items():
        found = (tmp_path / "box" / name).read_bytes()
        assert found == (content if isinstance(content, bytes) else content.read_bytes())


def test_any_tar_program_reads_it(tmp_path: Path, items: Items) -> None:
    bundle = make(tmp_path / "b.tar", items)
    with tarfile.open(bundle) as archive:
        assert archive.getnames() == ["MANIFEST.json", *sorted(items)]
        assert {(m.uid, m.gid, m.mtime, m.mode) for m in archive} == {(0, 0, 0, 0o644)}
    listed = subprocess.run(["tar", "tf", str(bundle)], capture_output=True, text=True)
    assert listed.returncode == 0 and not listed.stderr


def test_the_same_content_gives_the_same_bytes(tmp_path: Path, items: Items) -> None:
    first = make(tmp_path / "1.tar", items)
    second = make(tmp_path / "2.tar", dict(reversed(items.items())))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("title", FORGERIES)
def test_a_forged_bundle_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, title: str
) -> None:
    forge: Forge = FORGERIES[title]
    forge(tmp_path / "b.tar")
    with pytest.raises(ExpertflowError) as refusal:
        start(tmp_path / "box", tmp_path / "b.tar")
    assert len(str(refusal.value)) < 600 + len(str(tmp_path))
    assert str(refusal.value).encode().isascii() or title == "400 bytes"
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]


def test_there_are_many_forgeries() -> None:
    assert len(FORGERIES) > 100


def test_a_changed_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b.tar", {"results/e/x": b"content"})
    index = read_index(bundle)
    whole = bytearray(bundle.read_bytes())
    for place in range(len(whole)):
        for flip in (0x01, 0x80):
            whole[place] ^= flip
            bundle.write_bytes(whole)
            with pytest.raises(DataError):
                read_bundle(bundle, index, lambda _: (tmp_path / "out").open("wb"))
            whole[place] ^= flip


def test_a_bundle_that_was_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    index = read_index(make(tmp_path / "b.tar"))
    make(tmp_path / "b.tar", code={"a rule": "of other code"})
    with pytest.raises(DataError, match="was replaced while it was opened"):
        read_bundle(tmp_path / "b.tar", index, lambda _: (tmp_path / "out").open("wb"))


@pytest.mark.parametrize("place", ["none.tar", "."])
def test_a_path_without_a_bundle_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(DataError, match="no such file; correct the path"):
        read_index(tmp_path / place)


def test_a_name_that_could_not_be_opened_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two of its members have one place"):
        make(tmp_path / "b.tar", {"results/e/A": b"", "results/e/a": b""})


def test_a_file_that_changes_meanwhile_leaves_no_bundle(tmp_path: Path, items: Items) -> None:
    index = index_of(items)
    (tmp_path / "rows").write_bytes(b"ROWS" * 300)
    with pytest.raises(DataError, match="changed while it was packed"):
        write_bundle(tmp_path / "b.tar", index, items)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
