"""The file of a bundle: one tar for one content, and nothing else is let in."""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json, sha256_text
from expertflow.rental.bundle.records import BundleIndex, Member
from expertflow.rental.bundle.tar import Item, describe, read_bundle, read_index, write_bundle

LONG = "results/e/" + "a-long-folder/" * 20 + "naïve.json"


def index_of(items: dict[str, Item], **changes: Any) -> BundleIndex:
    settings = {"format": 1, "kind": "outcome", "expert": "e", "git": None, "code": {}, **changes}
    return BundleIndex(members=describe(items), **settings)


def make(path: Path, items: dict[str, Item], **changes: Any) -> Path:
    write_bundle(path, index_of(items, **changes), items)
    return path


def unpack(path: Path, target: Path) -> None:
    def create(member: Member) -> BinaryIO:
        place = target / member.name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place.open("xb")

    read_bundle(path, read_index(path), create)


@pytest.fixture
def items(tmp_path: Path) -> dict[str, Item]:
    (tmp_path / "rows").write_bytes(b"rows" * 300)
    return {
        "results/e/rows.arrow": Item(content=tmp_path / "rows"),
        "results/e/empty": Item(content=b""),
        LONG: Item(content=b"{}", brought=True),
    }


def test_members_come_out_as_they_went_in(tmp_path: Path, items: dict[str, Item]) -> None:
    bundle = make(tmp_path / "b.tar", items)
    unpack(bundle, tmp_path / "out")
    assert (tmp_path / "out/results/e/rows.arrow").read_bytes() == b"rows" * 300
    assert (tmp_path / "out" / LONG).read_bytes() == b"{}"
    assert {member.name: member.brought for member in read_index(bundle).members} == {
        "results/e/rows.arrow": False,
        "results/e/empty": False,
        LONG: True,
    }


def test_any_tar_program_reads_it(tmp_path: Path, items: dict[str, Item]) -> None:
    bundle = make(tmp_path / "b.tar", items)
    with tarfile.open(bundle) as archive:
        assert archive.getnames() == ["MANIFEST.json", *sorted(items)]
        assert {(m.uid, m.gid, m.mtime, m.mode) for m in archive} == {(0, 0, 0, 0o644)}
    listed = subprocess.run(["tar", "tf", str(bundle)], capture_output=True, text=True)
    assert listed.returncode == 0 and not listed.stderr


def test_the_same_content_gives_the_same_bytes(tmp_path: Path, items: dict[str, Item]) -> None:
    first = make(tmp_path / "1.tar", items)
    second = make(tmp_path / "2.tar", dict(reversed(items.items())))
    assert first.read_bytes() == second.read_bytes()


def test_a_changed_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    small = {"results/e/x": Item(content=b"content")}
    bundle = make(tmp_path / "b.tar", small)
    index = read_index(bundle)
    whole = bytearray(bundle.read_bytes())
    for place in range(len(whole)):
        for flip in (0x01, 0x80):
            whole[place] ^= flip
            bundle.write_bytes(whole)
            with pytest.raises(DataError):
                read_bundle(bundle, index, lambda member: None)
            whole[place] ^= flip


@pytest.mark.parametrize("n_bytes", [0, 1, 511, 512, 3000, -1, -600, -1200])
def test_a_bundle_cut_short_is_refused(
    tmp_path: Path, items: dict[str, Item], n_bytes: int
) -> None:
    bundle = make(tmp_path / "b.tar", items)
    index = read_index(bundle)
    bundle.write_bytes(bundle.read_bytes()[:n_bytes])
    with pytest.raises(DataError):
        read_bundle(bundle, index, lambda member: None)


def test_what_follows_the_end_is_refused(tmp_path: Path, items: dict[str, Item]) -> None:
    bundle = make(tmp_path / "b.tar", items)
    index = read_index(bundle)
    bundle.write_bytes(bundle.read_bytes() + b"\0")
    with pytest.raises(DataError, match="goes on after its end"):
        read_bundle(bundle, index, lambda member: None)


def test_a_bundle_that_was_replaced_meanwhile_is_refused(
    tmp_path: Path, items: dict[str, Item]
) -> None:
    index = read_index(make(tmp_path / "b.tar", items))
    make(tmp_path / "b.tar", items, code={"a rule": "of other code"})
    with pytest.raises(DataError, match="was replaced while it was opened"):
        read_bundle(tmp_path / "b.tar", index, lambda member: None)


@pytest.mark.parametrize(
    "names",
    [
        ["/etc/passwd"],
        ["../results/e/x"],
        ["results/e/../../x"],
        ["results/e/./x"],
        ["results/e//x"],
        ["results/e/x\n"],
        ["results/other/x"],
        ["results/e"],
        ["results/e/x", "results/e/x/y"],
        ["results/e/y", "results/e/x"],
        ["results/e/x", "results/e/x"],
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, names: list[str]) -> None:
    members = [{"name": n, "n_bytes": 0, "sha256": "", "brought": False} for n in names]
    value = {"format": 1, "kind": "outcome", "expert": "e", "git": None, "code": {}}
    value |= {"members": members}
    write_raw(tmp_path / "b.tar", value)
    with pytest.raises(DataError, match=r"does not lie in results/e|out of order or repeated"):
        read_index(tmp_path / "b.tar")


def write_raw(path: Path, value: dict[str, Any]) -> None:
    """Write an index as one would who knows the format."""
    text = canonical_json({"index": value, "sha256": sha256_text(canonical_json(value))}).encode()
    info = tarfile.TarInfo("MANIFEST.json")
    info.size, info.mode = len(text), 0o644
    with tarfile.open(path, "w") as archive:
        archive.addfile(info, io.BytesIO(text))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    bundle = make(tmp_path / "b.tar", {"results/e/x": Item(content=b"")})
    index = read_index(bundle)
    whole = bytearray(bundle.read_bytes())
    with tarfile.open(bundle) as archive:
        at = archive.getmember("results/e/x").offset
    info = tarfile.TarInfo("results/e/x")
    info.type, info.linkname, info.mode = kind, "/etc/passwd", 0o644
    whole[at : at + 512] = info.tobuf()
    bundle.write_bytes(whole)
    with pytest.raises(DataError, match="not as the index says"):
        read_bundle(bundle, index, lambda member: None)


def test_another_format_is_named(tmp_path: Path) -> None:
    write_raw(tmp_path / "b.tar", {"format": 2})
    with pytest.raises(DataError, match="of format 2 and this code reads 1"):
        read_index(tmp_path / "b.tar")


def test_a_plain_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_text(json.dumps({}))
    with pytest.raises(DataError, match="is no bundle"):
        read_index(tmp_path / "b.tar")
    with pytest.raises(DataError, match="no such bundle"):
        read_index(tmp_path / "c.tar")


def test_a_file_that_changes_meanwhile_leaves_no_bundle(
    tmp_path: Path, items: dict[str, Item]
) -> None:
    index = index_of(items)
    (tmp_path / "rows").write_bytes(b"ROWS" * 300)
    with pytest.raises(DataError, match="changed while it was packed"):
        write_bundle(tmp_path / "b.tar", index, items)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
