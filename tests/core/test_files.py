from pathlib import Path

import pytest

from expertflow.core.files import replacing, sha256_directory, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    write_text(target, "old")
    with pytest.raises(RuntimeError), replacing(target) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with replacing(tmp_path / "d") as partial:
            partial.mkdir()
            (partial / content).write_text(content)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["two"]


def test_directory_hashes_see_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    first = sha256_directory(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert sha256_directory(tmp_path) != first
