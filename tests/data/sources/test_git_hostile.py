"""The git source with malicious repositories: nothing runs, nothing breaks."""

import json
import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_git import git, read_commits

from expertflow.core.errors import DataError
from expertflow.data.sources.git import extract_commits
from expertflow.data.sources.git_objects import PATIENCE_BYTES
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_store import BIG_FILE_BYTES, resolve_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

ANN = b"Ann <ann@a.org> 1700000000 +0000"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "made.git")
    return tmp_path / "made.git"


def put(place: Path, kind: str, content: bytes) -> str:
    """Store any bytes as an object, even invalid ones."""
    return git(place, "hash-object", "-w", "--literally", "-t", kind, "--stdin", stdin=content)


def tree(place: Path, files: dict[bytes, bytes], mode: bytes = b"100644") -> str:
    entries = [
        mode + b" " + name + b"\0" + bytes.fromhex(put(place, "blob", content))
        for name, content in sorted(files.items())
    ]
    return put(place, "tree", b"".join(entries))


def commit(
    place: Path, files: dict[bytes, bytes] | str, *parents: str, author: bytes | None = ANN,
    message: bytes = b"Work\n", encoding: bytes | None = None,
) -> str:  # fmt: skip
    """Store a commit and make it the head of main."""
    root = files if isinstance(files, str) else tree(place, files)
    lines = [b"tree " + root.encode(), *(b"parent " + parent.encode() for parent in parents)]
    lines += [b"author " + author] if author is not None else []
    lines += [b"committer " + ANN, *([b"encoding " + encoding] if encoding else [])]
    made = put(place, "commit", b"\n".join(lines) + b"\n\n" + message)
    git(place, "update-ref", "refs/heads/main", made)
    return made


def extracted(place: Path, **options: Any) -> list[dict[str, Any]]:
    records = read_commits(place, **{"merges": "keep", **options})
    # Values that JSON and UTF-8 cannot represent would stop the next stage.
    assert json.dumps(records, ensure_ascii=False).encode()
    return records


def test_absurd_file_names(place: Path) -> None:
    names = ["a\nb.txt", ".git", ":(top)x", "n" * 5000, "\u2028\u0085", "1\t2\tthree"]
    commit(place, {b"\xff\xfe": b"text\n"} | {name.encode(): b"text\n" for name in names})
    (record,) = extracted(place)
    assert {file["path"] for file in record["files"]} == {*names, "\ufffd\ufffd"}
    assert record["n_added"] == 7 and record["bytes_replaced"]
    # One line per file, whatever else Python takes for a line end.
    assert len(record["changes"].splitlines()) == 7


SECOND = "1970-01-01T00:00:01Z"
# A commit's author line, and the author and date read from it.
AUTHORS: list[tuple[bytes | None, str | None, str | None]] = [
    (b"Ann <ann@a.org> 0 +9999", "Ann", "1970-01-01T00:00:00Z"),
    (b"Ann <ann@a.org> -1 +9999", "Ann", "1969-12-31T23:59:59Z"),
    (b"Ann <ann@a.org> -62135596800 +9999", "Ann", "0001-01-01T00:00:00Z"),
    (b"Ann <ann@a.org> " + b"9" * 5000 + b" +9999", "Ann", None),
    (b"Ann <ann@a.org> soon +9999", "Ann", None),
    (None, None, None),
    (b"", None, None),
    (b"<> 1 +0000", None, SECOND),
    (b"Ann <ann@a.org", "Ann", None),
    (b"<ann@a.org> 1 +0000", None, SECOND),
    (b"Ann <b> <ann@a.org> 1 +0000", "Ann", SECOND),
    (b"Ren\xe9 <r@a.org> 1 +0000", "Ren\ufffd", SECOND),
]


def test_absurd_authors_and_dates(place: Path) -> None:
    parent: list[str] = []
    for author, _, _ in AUTHORS:
        parent = [commit(place, {b"a": b"a"}, *parent, author=author)]
    records = extracted(place, pseudonymize=False)
    assert [(r["author"], r["authored_at"]) for r in records] == [found[1:] for found in AUTHORS]
    for (author, name, _), record in zip(AUTHORS, extracted(place), strict=True):
        known = name or b"@" in (author or b"")
        assert (record["author"] or "").startswith("Contributor ") == bool(known)
    skipped: Counter[str] = Counter()
    read_commits(place, skipped, since="0001-01-01", until="9999-12-31")
    assert skipped["date"] == sum(date is None for _, _, date in AUTHORS)


# A commit's declared encoding, its message, and the text read from it.
MESSAGES: list[tuple[bytes | None, bytes, str]] = [
    (b"ISO-8859-1", b"caf\xe9", "café"),
    (b"iso-2022-jp", "日本".encode("iso-2022-jp"), "日本"),
    (b"nonsense", "café".encode(), "café"),
    (b"utf\x00-8", b"caf\xe9", "caf\ufffd"),
    (b"undefined", b"caf\xe9", "caf\ufffd"),
    (b"unicode_escape", rb"\ud800", r"\ud800"),
    (b"hex", b"6162", "6162"),
    *((None, raw, raw.decode()) for raw in (b"", b"\n\n\n", b"nul \0 inside")),
    # These must be fast.
    *((None, part * 100_000, part.decode() * 100_000) for part in (b"-by", b"a", b"a@")),
    (None, b"X-by:" + b" " * 300_000, "X-by:" + " " * 300_000),
]


def test_absurd_messages(place: Path) -> None:
    parent: list[str] = []
    for encoding, raw, _ in MESSAGES:
        parent = [commit(place, {b"a": b"a"}, *parent, message=raw, encoding=encoding)]
    records = extracted(place)
    assert [record["message"] for record in records] == [text for _, _, text in MESSAGES]
    assert all(record["bytes_replaced"] == ("\ufffd" in record["message"]) for record in records)


def test_a_message_without_end_is_cut(place: Path) -> None:
    first = commit(place, {b"a": b"a"}, message=b"long " * 500_000)
    commit(place, {b"a": b"b"}, first, message=b"next\n")
    long, following = extracted(place)
    assert long["message_truncated"] and len(long["message"]) < 1 << 20
    assert (following["message"], following["n_files"]) == ("next\n", 1)


def test_big_files_are_listed_and_not_loaded(place: Path) -> None:
    big = b"line\n" * (BIG_FILE_BYTES // 5 + 1)
    first = commit(place, {b"big": big, b"kept": big, b"old": b"one\n" * 9})
    new = {b"bigger\n": big + b"more\n", b"kept": big + b"end\n", b"new": b"one\n" * 9}
    commit(place, new, first)
    start, moved = extracted(place)
    assert {file["path"]: file["n_added"] for file in start["files"]} == {
        "big": None, "kept": None, "old": 9
    }  # fmt: skip
    # To detect a rename, the big one would have to be loaded; the small one is detected.
    assert {file["path"]: file["renamed_from"] for file in moved["files"]} == {
        "big": None, "bigger\n": None, "kept": None, "new": "old"
    }  # fmt: skip
    assert "more" not in moved["diff"] and "rename to new" in moved["diff"]


def test_more_big_files_than_can_be_left_out(place: Path) -> None:
    big = put(place, "blob", b"line\n" * (BIG_FILE_BYTES // 5 + 1))
    listed = "".join(f"100644 blob {big}\t{number:0600d}\0" for number in range(99))
    first = commit(place, {b"a": b"a"})
    commit(place, git(place, "mktree", "-z", stdin=listed.encode()), first)
    skipped: Counter[str] = Counter()
    assert len(read_commits(place, skipped)) == 1
    assert skipped == {"big_files": 1}


def test_a_patch_that_does_not_end_is_left(place: Path) -> None:
    n_files, n_lines = 2 * PATIENCE_BYTES // 1_000_000, 250_000
    wide = {b"%03d" % n: (b"%03d\n" % n) * n_lines for n in range(n_files)}
    first = commit(place, wide)
    commit(place, {b"a": b"a\n"}, first)
    records = extracted(place)
    assert records[0]["diff_truncated"] and records[0]["n_added"] == n_files * n_lines
    assert records[1]["n_deleted"] == n_files * n_lines


def test_links_and_submodules_are_only_listed(place: Path) -> None:
    links = tree(place, {b"passwd": b"/etc/passwd", b"up": b"../../.."}, mode=b"120000")
    first = commit(place, links)
    gitlink = put(place, "tree", b"160000 sub\0" + b"\x12" * 20)
    commit(place, gitlink, first)
    link, sub = extracted(place)
    assert "+/etc/passwd" in link["diff"] and "root:" not in link["diff"]
    assert "+Subproject commit 1212" in sub["diff"]


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that must not run: it leaves a file."""
    path = tmp_path / "trap.sh"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_settings_of_the_repository_are_ignored(place: Path, tmp_path: Path, trap: Path) -> None:
    attributes = b"* diff=trap filter=trap -text\n"
    first = commit(place, {b"a.txt": b"one\n", b".gitattributes": attributes})
    second = commit(place, {b"a.txt": b"two\n"}, first, message=b"Second\n")
    before = extracted(place)
    programs = (
        "diff.external diff.trap.textconv diff.trap.command filter.trap.smudge filter.trap.clean"
        " core.fsmonitor core.pager core.editor core.sshCommand core.alternateRefsCommand"
        " core.gitProxy core.askPass uploadpack.packObjectsHook credential.helper gpg.program"
        " alias.rev-list"
    )
    for key in programs.split():
        git(place, "config", key, str(trap))
    for key in ("diff.noprefix", "diff.trap.binary", "log.showSignature", "core.quotePath"):
        git(place, "config", key, "true")
    git(place, "config", "diff.orderFile", "/dev/zero")
    (place / "hooks").mkdir(exist_ok=True)
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        (place / "hooks" / hook).symlink_to(trap)
    (place / "info").mkdir(exist_ok=True)
    (place / "info" / "attributes").write_text("* diff=trap -diff\n", encoding="utf-8")
    (place / "info" / "grafts").write_text(f"{second}\n", encoding="utf-8")
    git(place, "update-ref", f"refs/replace/{second}", first)
    (place / "objects" / "info" / "alternates").write_text("/dev/null\n/none\n", encoding="utf-8")
    (tmp_path / "sprung").unlink(missing_ok=True)
    assert extracted(place) == before
    assert not (tmp_path / "sprung").exists()


def test_missing_objects_are_not_fetched(place: Path, tmp_path: Path, trap: Path) -> None:
    first = commit(place, {b"a": b"one\n"})
    commit(place, {b"a": b"two\n"}, first)
    missing = git(place, "rev-parse", "HEAD:a")
    (place / "objects" / missing[:2] / missing[2:]).unlink()
    for key, value in (
        *(("core.repositoryFormatVersion", "1"), ("extensions.partialClone", "origin")),
        *(("remote.origin.url", str(tmp_path)), ("remote.origin.promisor", "true")),
        ("remote.origin.uploadpack", str(trap)),
    ):
        git(place, "config", key, value)
    with pytest.raises(DataError, match="partial clone"):
        extracted(place)
    with pytest.raises(DataError, match="is not a commit"):
        resolve_commit(place, ref="f" * 40)
    with pytest.raises(DataError, match=r"a branch, tag or commit$"):
        resolve_commit(place, ref="main..main")
    assert not (tmp_path / "sprung").exists()


def test_another_owner_does_not_matter(place: Path) -> None:
    commit(place, {b"a": b"a"})
    try:
        os.chown(place, 12345, 12345)
    except OSError as error:
        pytest.skip(f"this user cannot give a folder away: {error}")
    assert len(extracted(place)) == 1


def test_a_shallow_clone_is_read_without_its_edge(place: Path, tmp_path: Path) -> None:
    parents: list[str] = []
    for number in range(4):
        parents = [commit(place, {b"a": b"%d\n" % number}, *parents)]
    git(tmp_path, "clone", "--quiet", "--depth=3", place.as_uri(), "shallow")
    skipped: Counter[str] = Counter()
    records = read_commits(tmp_path / "shallow", skipped)
    assert records == extracted(place)[2:]
    assert skipped == {"shallow": 1}


def test_other_layouts_have_the_same_records(place: Path, tmp_path: Path) -> None:
    commit(place, {b"a": b"a\n"})
    made = extracted(place)
    git(tmp_path, "clone", "--quiet", str(place), "clone")
    assert extracted(tmp_path / "clone") == made
    git(tmp_path / "clone", "worktree", "add", "--quiet", "../linked")
    git(tmp_path, "clone", "--quiet", "--shared", str(place), "shared\nclone")
    assert extracted(tmp_path / "shared\nclone") == made
    assert extracted(tmp_path / "linked")[0]["diff"] == made[0]["diff"]


def test_sha256_repositories_and_bundles(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--bare", "--object-format=sha256", "new.git")
    place = tmp_path / "new.git"
    git(place, "symbolic-ref", "HEAD", "refs/heads/main")
    first = commit(place, {b"a": b"a\n"})
    commit(place, {b"a": b"b\n"}, first)
    records = extracted(place)
    assert len(records[0]["commit"]) == 64
    git(place, "bundle", "create", "--quiet", "../new.bundle", "HEAD", "main")
    assert extracted(tmp_path / "new.bundle") == records


def test_an_incomplete_bundle_is_one_line(place: Path, tmp_path: Path) -> None:
    first = commit(place, {b"a": b"a\n"})
    commit(place, {b"a": b"b\n"}, first)
    bundle = tmp_path / "made.bundle"
    git(place, "bundle", "create", "--quiet", str(bundle), "main", "HEAD", f"^{first}")
    incremental = bundle.read_bytes()
    git(place, "bundle", "create", "--quiet", str(bundle), "main", "HEAD")
    for content in (incremental, bundle.read_bytes()[:-30], b"", b"# hello\n"):
        bundle.write_bytes(content)
        with pytest.raises(DataError, match=r"unpacked|not a git bundle") as caught:
            extracted(bundle)
        assert "\n" not in str(caught.value)


def test_an_abandoned_walk_leaves_no_process(place: Path) -> None:
    first = commit(place, {b"a": b"a\n"})
    commit(place, {b"a": b"b\n"}, first)
    stream = extract_commits(place, GitOptions(), Counter())
    next(stream)
    assert any(map(is_reading, psutil.Process().children()))
    stream.close()
    assert not any(map(is_reading, psutil.Process().children()))


def is_reading(child: psutil.Process) -> bool:
    # Other processes' children may end meanwhile.
    with suppress(psutil.Error):
        return "diff-tree" in child.cmdline()
    return False
