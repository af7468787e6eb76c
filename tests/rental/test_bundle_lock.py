"""The lock where a bundle was opened: it stands in for raw data that is absent, not for other."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json
from expertflow.core.hashes import HashCache
from expertflow.core.records import from_json, to_json
from expertflow.data.lock import lock_sources, write_lock
from expertflow.data.records import ExpertLock
from expertflow.data.settings import SourceSpec


def lock(folder: Path, source: SourceSpec, bundled: ExpertLock | None = None) -> ExpertLock:
    cache = HashCache(folder / "hashes.json")
    return lock_sources(
        "e", (source,), hashes=cache, generator_digest=lambda name: name, bundled=bundled
    )


def test_data_may_be_absent_or_elsewhere(tmp_path: Path) -> None:
    source = SourceSpec(name="s", kind="local", path=str(tmp_path / "*.jsonl"), text="{x}")
    (tmp_path / "d.jsonl").write_text("{}\n")
    made = lock(tmp_path, source)
    # The same data may lie elsewhere.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "d.jsonl").rename(elsewhere / "d.jsonl")
    moved = replace(source, path=str(elsewhere / "*.jsonl"))
    assert lock(tmp_path, moved, made) == made
    more = replace(moved, n_shards=3)
    assert lock(tmp_path, more, made).sources == (replace(made.sources[0], n_shards=3),)
    assert lock(tmp_path, source, made) == made
    with pytest.raises(DataError, match="no file at"):
        lock(tmp_path, source)
    # Links to nothing are no data.
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "gone")
    for named in (source, replace(source, path=str(tmp_path / "d.jsonl"))):
        assert lock(tmp_path, named, made) == made


def commit(repository: Path, text: str) -> None:
    repository.mkdir()
    (repository / "file").write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "file"], [*who, "commit", "-q", "-m", text]):
        subprocess.run(["git", "-C", str(repository), *words], check=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_repository_may_be_absent_or_elsewhere_but_no_other(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    source = SourceSpec(name="s", kind="git", path=str(repository), text="{x}")
    commit(repository, "one")
    made = lock(tmp_path, source)
    repository.rename(tmp_path / "moved")
    assert lock(tmp_path, source, made) == made
    moved = replace(source, path=str(tmp_path / "moved"))
    assert lock(tmp_path, moved, made) == made
    other = replace(moved, options={"ref": "HEAD"})
    assert lock(tmp_path, other, made) == lock(tmp_path, other) != made
    commit(repository, "two")
    with pytest.raises(DataError, match="repository differs from what the bundle of e"):
        lock(tmp_path, source, made)


def test_a_bundled_generator_keeps_its_order_and_a_changed_one_is_another(tmp_path: Path) -> None:
    source = SourceSpec(
        name="s", kind="generated", generator="text_to_sql", n_documents=4, seed=1, text="{x}"
    )
    made, path = lock(tmp_path, source), tmp_path / "sources.lock.json"
    assert write_lock(path, made)
    bundled = from_json(ExpertLock, json.loads(canonical_json(to_json(made))))
    assert list(bundled.sources[0].identity) != list(made.sources[0].identity)
    assert not write_lock(path, lock(tmp_path, source, bundled))
    more = replace(source, n_documents=8)
    assert lock(tmp_path, more, made) == lock(tmp_path, more) != made
