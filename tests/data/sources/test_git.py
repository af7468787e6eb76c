"""The git source, with a repository made here and, if available, a real bundle."""

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from expertflow.core.errors import DataError, ExpertflowError
from expertflow.data.records import SourceLock
from expertflow.data.secrets import replace_emails
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.base import Pinned, Pins
from expertflow.data.sources.git import GitRepository, extract_commits
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_store import resolve_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(
    place: Path, *arguments: str, day: int = 1, who: str = "Ann <ann@a.org>", stdin: bytes = b""
) -> str:
    name, e_mail = who.rstrip(">").split(" <")
    stamp = f"2024-03-{day:02d}T23:30:00+0200"
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": e_mail}
        environment |= {f"GIT_{role}_DATE": stamp}
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(place), *arguments]
    done = subprocess.run(command, env=environment, input=stdin, check=True, capture_output=True)
    return done.stdout.decode(errors="replace").strip()


def commit(place: Path, files: dict[str, bytes], message: str, **settings: Any) -> str:
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--allow-empty", "-m", message, **settings)
    return git(place, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    git(place, "init", "--quiet", "--initial-branch=main")
    commit(place, {"a.txt": b"one\ntwo\n", "p q\u00e9.py": b"x = 1\n"}, "Start\n\nBody.", day=1)
    bob = "Bob <bob@b.org>"
    commit(place, {"a.txt": b"one\n2\n", "bin": b"\0\1"}, "Change", day=2, who=bob)
    git(place, "tag", "-a", "v1", "-m", "first")
    git(place, "checkout", "--quiet", "-b", "topic")
    trailer = "Topic\n\nAsk carl@c.org.\n\nCo-authored-by: Ann <ann@a.org>"
    commit(place, {"src/t.py": b"caf\xe9\n"}, trailer, day=3, who=bob)
    git(place, "checkout", "--quiet", "main")
    commit(place, {"b.txt": b"b\n"}, "Main goes on", day=4)
    git(place, "merge", "--quiet", "--no-ff", "topic", "-m", "Merge topic", day=5)
    git(place, "mv", "a.txt", "moved.txt")
    commit(place, {}, "Move", day=6)
    return place


@pytest.fixture
def repository(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


def read_commits(
    repository: Path, skipped: Counter[str] | None = None, **options: Any
) -> list[dict[str, Any]]:
    chosen = GitOptions.from_manifest(options)
    return list(extract_commits(repository, chosen, Counter() if skipped is None else skipped))


def extracted(repository: Path, **options: Any) -> dict[str, dict[str, Any]]:
    return {record["subject"]: record for record in read_commits(repository, **options)}


def test_a_record_describes_the_commit(repository: Path) -> None:
    records = extracted(repository)
    assert set(records) == {"Start", "Change", "Topic", "Main goes on", "Move"}
    start, change = records["Start"], records["Change"]
    assert start["parents"] == []
    assert start["message"] == "Start\n\nBody.\n"
    assert start["authored_at"] == "2024-03-01T21:30:00Z"
    assert [file["path"] for file in start["files"]] == ["a.txt", "p q\u00e9.py"]
    assert change["parents"] == [start["commit"]]
    assert change["files"] == [
        {"path": "a.txt", "renamed_from": None, "n_added": 1, "n_deleted": 1},
        {"path": "bin", "renamed_from": None, "n_added": None, "n_deleted": None},
    ]
    assert change["changes"] == "a.txt | +1 -1\nbin | binary\n"
    assert (change["n_files"], change["n_added"], change["n_deleted"]) == (2, 1, 1)
    assert "-two\n+2\n" in change["diff"]
    assert not change["diff_truncated"] and not change["is_merge"] and not change["bytes_replaced"]
    assert change["refs"] == ["v1"]
    topic = records["Topic"]
    assert topic["bytes_replaced"] and "+caf\ufffd\n" in topic["diff"]
    assert records["Move"]["refs"] == ["main"]
    moved = {"path": "moved.txt", "renamed_from": "a.txt", "n_added": 0, "n_deleted": 0}
    assert records["Move"]["files"] == [moved]
    assert records["Move"]["changes"] == "a.txt => moved.txt | +0 -0\n"
    # A merge is shown against its first parent.
    *earlier, merge, _ = read_commits(repository, merges="keep")
    assert merge["subject"] == "Merge topic" and merge["is_merge"]
    assert [file["path"] for file in merge["files"]] == ["src/t.py"]
    assert {record["commit"] for record in earlier}.issuperset(merge["parents"])


def test_commits_with_replaced_bytes_are_counted(repository: Path, tmp_path: Path) -> None:
    spec = SourceSpec(name="s", kind="git", path=str(repository))
    tip = git(repository, "rev-parse", "HEAD").strip()
    lock = SourceLock(name="s", kind="git", n_shards=1, revision=tip, identity={}, files=())
    (file,) = GitRepository(spec).fetch(lock, tmp_path).files
    note = file.notes[-1]
    assert note.startswith("1 of the commits") and "U+FFFD" in note


def test_a_diff_is_what_git_shows(repository: Path) -> None:
    for record in read_commits(repository, max_diff_bytes=10**6):
        if not record["bytes_replaced"]:
            shown = git(repository, "show", "-z", "--format=", "--abbrev=7", record["commit"])
            assert record["diff"].strip() == shown.strip("\0\n")


def test_names_and_addresses_are_hidden_by_default(repository: Path) -> None:
    said = (
        "Thank Bob and Eve Grün\n\nNot Bobby, and never Eve Grünewald.\n\n Acked-By: Zed <z@z.org>"
    )
    code = "# Eve Grün <eve@g.org>, Bob\n+eve@g.org\nEve Grüns\n"
    commit(repository, {"eve@g.org.py": code.encode()}, said, day=7, who="Eve Grün <EVE@g.org>")
    record = extracted(repository)["Thank Contributor 2 and Contributor 3"]
    eve = replace_emails("eve@g.org")
    assert record["author"] == "Contributor 3"
    assert record["message"].endswith(
        "Not Bobby, and never Eve Grünewald.\n\n Acked-By: Contributor 4\n"
    )
    assert f"+# Contributor 3 <{eve}>, Bob\n++{eve}\n+Eve Grüns\n" in record["diff"]
    assert "eve@g.org" not in json.dumps(record).lower()
    named = extracted(repository, pseudonymize=False)["Topic"]
    assert named["author"] == "Bob"
    assert "Co-authored-by: Ann <ann@a.org>" in named["message"]


@pytest.mark.parametrize(
    ("trailer", "hidden"),
    [
        ("Reported-by: Bob", "Reported-by: Contributor 2"),
        ("Reported-by: Jo Lund (by phone)", "Reported-by: somebody (by phone)"),
        ("Signed-off-by: Jo Lund, Ann", "Signed-off-by: somebody"),
        (" Suggested-By:\tJo jo@l.org", f" Suggested-By: somebody {replace_emails('jo@l.org')}"),
        ("Reported-by: jo.lund@l.org", f"Reported-by: {replace_emails('jo.lund@l.org')}"),
        ("Fixed-by: 4f6a, a1b2", "Fixed-by: 4f6a, a1b2"),
        ("Reviewed-by: Ann <ann@a.org>", "Reviewed-by: Contributor 1"),
        ("sort-by: name", "sort-by: name"),
        ("Reported-by: " + "x" * 300, "Reported-by: " + "x" * 300),
    ],
    ids=lambda text: text[:20],
)
def test_a_name_without_an_address_is_hidden(repository: Path, trailer: str, hidden: str) -> None:
    commit(repository, {}, f"Last\n\n{trailer}", day=8)
    commit(repository, {"new.txt": b""}, f"Next\n\n{trailer}", day=9)
    assert extracted(repository)["Next"]["message"] == f"Next\n\n{hidden}\n"


def test_the_narrative_is_complete(repository: Path) -> None:
    git(repository, "tag", "v2", "topic")
    topic = extracted(repository)["Topic"]
    assert (topic["branch"], topic["tag"]) == ("main", "v2")
    head_lines = f"Commit {topic['commit'][:12]}\nWritten on 2024-03-03 by Contributor 2"
    assert topic["narrative"] == (
        f"{head_lines}, on main, in v2.\n\n{topic['message']}\n"
        f"Changes in 1 file, +1 -0:\nsrc/t.py | +1 -0\n\n{topic['diff']}"
    )


def test_a_commit_has_its_first_tag_and_the_walked_branch(repository: Path) -> None:
    git(repository, "tag", "later", "topic")
    git(repository, "tag", "also", "topic")
    tags = {subject: record["tag"] for subject, record in extracted(repository).items()}
    tagged = {"Start": "v1", "Change": "v1", "Topic": "also"}
    assert tags == {**tagged, "Main goes on": None, "Move": None}
    for ref, branch in (("HEAD", "main"), ("topic", "topic"), ("v1", "v1"), ("topic~1", None)):
        assert {record["branch"] for record in extracted(repository, ref=ref).values()} == {branch}


def test_a_new_tag_or_branch_changes_the_lock(repository: Path, tmp_path: Path) -> None:
    def pin(path: Path) -> Pinned:
        pins = Pins(lambda _: "", lambda _: "")
        return GitRepository(SourceSpec(name="s", kind="git", path=str(path))).pin(pins)

    bundle, found = tmp_path / "made.bundle", []
    for command in (("status",), ("tag", "v2"), ("branch", "more", "v1"), ("branch", "-D", "more")):
        git(repository, *command)
        git(repository, "bundle", "create", "--quiet", str(bundle), "--all")
        found.append((pin(repository), pin(bundle)))
    for first, tagged, branched, last in zip(*found, strict=True):
        assert first.revision == branched.revision
        assert first != tagged != branched != last == tagged
    # A branch that is not part of the history has no commit in the records.
    git(repository, "checkout", "--quiet", "-b", "ahead")
    commit(repository, {"ahead.txt": b""}, "Ahead", day=9)
    git(repository, "checkout", "--quiet", "main")
    assert pin(repository) == found[-1][0]


MERGE, GOES_ON = {"merge": 1}, "Main goes on"


@pytest.mark.parametrize(
    ("options", "subjects", "left_out"),
    [
        ({}, {"Start", "Change", "Topic", GOES_ON, "Move"}, MERGE),
        ({"merges": "keep", "ref": "v1"}, {"Start", "Change"}, {}),
        ({"merges": "keep", "since": "2024-03-05"}, {"Merge topic", "Move"}, {"date": 4}),
        ({"until": "2024-03-02"}, {"Start", "Change"}, {**MERGE, "date": 3}),
        ({"until": 20240302}, {"Start", "Change"}, {**MERGE, "date": 3}),
        ({"until": "2024-03-02T21:29:59"}, {"Start"}, {**MERGE, "date": 4}),
        ({"authors": ["BOB@"]}, {"Change", "Topic"}, {**MERGE, "author": 3}),
        ({"paths": ["src"]}, {"Topic"}, {**MERGE, "paths": 4}),
        ({"paths": ["*.txt"]}, {"Start", "Change", GOES_ON, "Move"}, {**MERGE, "paths": 1}),
        ({"languages": ["python"]}, {"Start", "Topic"}, {**MERGE, "languages": 3}),
        ({"max_files": 1}, {"Topic", GOES_ON}, {**MERGE, "too_many_files": 3}),
    ],
)
def test_options_select_commits_and_what_is_left_out_is_counted(
    repository: Path, options: dict[str, Any], subjects: set[str], left_out: dict[str, int]
) -> None:
    skipped: Counter[str] = Counter()
    records = read_commits(repository, skipped, **options)
    assert ({record["subject"] for record in records}, dict(skipped)) == (subjects, left_out)
    if options == {"languages": ["python"]}:
        # Files in other languages are left out of everything.
        start = records[0]
        assert [file["path"] for file in start["files"]] == ["p q\u00e9.py"]
        assert (start["n_files"], start["n_added"]) == (1, 1)
        assert "a.txt" not in start["diff"] and "a.txt" not in start["narrative"]


def test_a_long_diff_is_cut_at_a_line_and_flagged(repository: Path) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(40_000))
    commit(repository, {"long.txt": lines, "z.txt": b"z\n"}, "Long", day=7)
    commit(repository, {"wide.txt": "\u00e9".encode() * 300_000}, "Wide", day=8)
    commit(repository, {"after.txt": b"after\n"}, "After", day=9)
    records = extracted(repository, max_diff_bytes=1000)
    long, wide = records["Long"], records["Wide"]
    assert long["diff_truncated"] and long["diff"].endswith("\n")
    assert 980 < len(long["diff"].encode()) <= 1000
    assert (long["n_files"], long["n_added"]) == (2, 40_001)
    assert wide["diff_truncated"] and not wide["bytes_replaced"]
    assert records["After"]["diff"].endswith("+after\n")


def test_a_bundle_has_the_same_records_and_head(repository: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "made.bundle"
    git(repository, "bundle", "create", "--quiet", str(bundle), "HEAD", "main", "topic", "v1")
    assert (
        resolve_commit(bundle) == resolve_commit(repository) == git(repository, "rev-parse", "HEAD")
    )
    for options in ({}, {"ref": "topic"}, {"ref": "v1"}):
        assert read_commits(bundle, **options) == read_commits(repository, **options)
    git(repository, "tag", "file", "HEAD:b.txt")
    git(repository, "bundle", "create", "--quiet", str(bundle), "main", "file")
    for ref, fix in ("file", "to another ref"), ("HEAD", "to one of refs/heads/main, refs/tags/f"):
        with pytest.raises(DataError, match=f"set options.ref {fix}"):
            read_commits(bundle, ref=ref)


def test_an_unreadable_repository_is_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (empty, {}, "not a git repository .* set the source's path to a clone or a .bundle file"),
        (tmp_path / "none", {}, "not a git repository"),
        (repository / "b.txt", {}, "not a git bundle"),
        (repository, {"ref": "nowhere"}, "nowhere is not a commit"),
        (repository, {"since": "2030-01-01"}, "no commit of HEAD is selected"),
        (repository, {"since": "soon"}, "options.since: 'soon'"),
        (repository, {"merges": "drop"}, "options.merges: 'drop'"),
        (repository, {"path": ["a"]}, "options.path: unknown"),
        (repository, {"paths": "a"}, "options.paths: 'a'"),
        (repository, {"paths": ["src", "/src"]}, "options.paths: '/src' is not a path inside"),
        (repository, {"paths": ["a/../../b"]}, "is not a path inside the repository"),
        (repository, {"paths": [""]}, "options.paths: '' is not a path"),
        (repository, {"languages": ["cobol"]}, "options.languages: 'cobol' is unknown"),
        (repository, {"languages": ["go"], "paths": [":/a"]}, "options.paths: ':/a'"),
        (repository, {"max_files": 0}, "options.max_files: 0"),
        (repository, {"ref": "--all"}, "options.ref: '--all'"),
    ]
    for place, options, said in cases:
        with pytest.raises(ExpertflowError, match=said) as caught:
            read_commits(place, **options)
        assert "\n" not in str(caught.value)
    git(empty, "init", "--quiet")
    with pytest.raises(DataError, match="HEAD is not a commit"):
        resolve_commit(empty)
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(DataError, match="install git"):
        resolve_commit(repository)
