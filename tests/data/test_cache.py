"""What the Hugging Face caches hold, off trees laid out as the libraries lay them out."""

from pathlib import Path
from typing import Any

import pytest
from loopback_hub import write_hub_cache, write_prepared_cache

from expertflow.core.errors import DataError
from expertflow.data import cache
from expertflow.data.settings import SourceSpec

COMMITS = ["a" * 40, "b" * 40]
CARD = b"---\nlicense: cc0-1.0\n---\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def source(**changes: Any) -> SourceSpec:
    return SourceSpec(name="s", kind="hub", **{"id": "someone/sums", **changes})


def test_the_environment_names_the_caches(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cache.hub_cache(), cache.find_prepared_cache()) == (home / "hub", home / "datasets")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    monkeypatch.setenv("HF_DATASETS_CACHE", "~/d")
    found = cache.hub_cache(), cache.find_prepared_cache()
    assert found == (Path("/c"), Path("~/d").expanduser())
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name)
    assert cache.hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.hub_cache() == Path("/x/huggingface/hub")


@pytest.mark.parametrize("name", ["sums", "CypherBench", "Text-to-sql-v1", "aB2C", "SQLite3DB"])
def test_folders_are_named_as_the_library_names_them(name: str) -> None:
    from datasets.naming import camelcase_to_snakecase

    assert cache.snake_case(name) == camelcase_to_snakecase(name)


def test_a_card_states_its_license(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    for head, license in (
        ("license: mit", "mit"),
        ("license:\n- mit\n- cc-by-4.0", "mit, cc-by-4.0"),
        ("license: other\nlicense_name: stack-terms", "stack-terms"),
        ("license: other", "other"),
        *((other, None) for other in ("title: x", "license: [", "just text")),
    ):
        card.write_text(f"---\n{head}\n---\n# Title\nlicense: wrong\n")
        assert cache.card_license(cache.front_matter(card)) == license


def test_a_prepared_commit_is_found_and_never_another_one(home: Path) -> None:
    for commit in COMMITS:
        write_prepared_cache(home, 5, repository="someone/sums", commit=commit)
    found = cache.find_source(source(revision=COMMITS[1]))
    assert found is not None and found.commit == COMMITS[1]
    assert found.n_records_by_split == {"train": 5}
    for other in ("c" * 40, "v2"):
        assert cache.find_source(source(revision=other)) is None
    # Two commits and no word on which is meant: neither is taken.
    assert cache.find_source(source()) is None
    write_hub_cache(home, {"README.md": CARD}, repository="someone/sums", commit=COMMITS[0])
    newest = cache.find_source(source())
    assert newest is not None and newest.commit == COMMITS[0]
    revisions = [cache.find_revision("someone/sums", r) for r in (None, COMMITS[1], "v2")]
    assert revisions == [*COMMITS, None]


def test_configs_and_options_are_kept_apart(home: Path) -> None:
    write_prepared_cache(home, 1, repository="someone/sums", commit=COMMITS[0], config="hard")
    assert cache.find_source(source()) is None
    assert cache.find_source(source(config="hard")) is not None
    assert cache.find_source(source(config="hard", options={"data_dir": "a"})) is None
    a, b = {"config_name": "a"}, {"config_name": "b"}
    for configs, expected in (
        ([a], "a"), ([a, b], "default"), ([a, {**b, "default": True}], "b"), ("broken", "default"),
    ):  # fmt: skip
        assert cache.default_config({"configs": configs}) == expected


def test_a_splits_files_are_told_by_their_names(home: Path) -> None:
    folder = write_prepared_cache(home, 1, repository="someone/sums", commit=COMMITS[0])
    (folder / "sums-train.arrow").unlink()
    parts = [f"t-v1-train-0000{i}-of-00002.arrow" for i in range(2)]
    for name in (*reversed(parts), "x-train_sft.arrow", "cache-1234.arrow"):
        (folder / name).write_bytes(b"")
    assert [path.name for path in cache.read_prepared(folder).files("train")] == parts


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"splits": {"train": {}}}'])
def test_a_damaged_description_is_one_line(home: Path, text: str) -> None:
    folder = write_prepared_cache(home, 1, repository="someone/sums", commit=COMMITS[0])
    (folder / "dataset_info.json").write_text(text)
    with pytest.raises(DataError, match=r"delete .* and fetch again"):
        cache.read_prepared(folder)
    assert cache.list_prepared(cache.find_prepared_root("someone/sums")) == []
