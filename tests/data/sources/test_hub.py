"""The hub source with a hub on loopback, and caches in the libraries' layout."""

import errno
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import (
    COMMIT,
    Hub,
    Repository,
    fetch,
    jsonl,
    serving,
    write_hub_cache,
    write_prepared_cache,
)
from support import wait_for

from expertflow.core.errors import DataError
from expertflow.data import cache
from expertflow.data.settings import SourceSpec
from expertflow.data.sources import hub_errors

SUMS = {"id": "someone/sums"}
CARD = b"---\nlicense: cc0-1.0\n---\n# Sums\n"
CONFIGS = b"""---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy/*.jsonl}
  - {split: test, path: held/*.jsonl}
- config_name: hard
  data_files: [{split: train, path: hard/*.jsonl}]
---
"""
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def test_a_data_set_is_pinned_fetched_and_then_read_offline(tmp_path: Path) -> None:
    files = {"README.md": CARD, "train.jsonl": jsonl(30), "test.jsonl": jsonl(3)}
    with serving(Hub({"someone/sums": Repository(files)})) as hub:
        online = fetch(tmp_path, hub.endpoint, SUMS)
    (first,) = online.results
    assert first["revision"] == COMMIT
    assert first["rows"] == [json.loads(line) for line in files["train.jsonl"].splitlines()]
    assert first["card_license"] == "cc0-1.0"
    assert "someone/sums@cccccccc: downloading 2 files, " in online.log
    assert "\r" not in online.log and "HTTP Request" not in online.log
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        (again,) = fetch(tmp_path, None, SUMS, **environment).results
        # Not even loaded, so there cannot have been a network request.
        assert again["libraries"] == []
        assert {**again, "libraries": None} == {**first, "libraries": None}


def test_a_file_that_differs_from_the_commits_is_one_line_and_not_used(tmp_path: Path) -> None:
    rows = jsonl(30)
    sent = {"other": rows.replace(b"7", b"8"), "shorter": rows[:-25], "longer": rows + b" "}
    first, second = (f"train-0000{i}-of-00002.jsonl" for i in range(2))
    repositories = {
        f"someone/{name}": Repository({first: jsonl(2), second: rows}, sent={second: content})
        for name, content in sent.items()
    }
    sources = [{"id": name} for name in repositories]
    told = rf"source s: \S+/{second}: is not its commit's file; .*; delete (\S+) and run ag"
    with serving(Hub(repositories)) as hub:
        refused = fetch(tmp_path, hub.endpoint, *sources).results
        blobs = [Path(blob) for one in refused for blob in re.findall(told, one["error"])]
        for blob in blobs:
            blob.unlink()
        assert list(tmp_path.rglob("*.arrow")) == []
        for repository in repositories.values():
            repository.sent.clear()
        found = fetch(tmp_path, hub.endpoint, *sources).results
    assert [one["n_records"] for one in found] == [[32]] * 3
    # Changed in the cache before it is read again, offline.
    for blob, content in zip(blobs, sent.values(), strict=True):
        blob.write_bytes(content)
    shutil.rmtree(tmp_path / "datasets")
    for changed in fetch(tmp_path, None, *sources).results:
        assert re.match(told, changed["error"])


def parquet(start: int, n: int, **options: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": list(range(start, start + n))}), sink, **options)
    return sink.getvalue().to_pybytes()


PARTS = {
    "README.md": CARD.replace(
        b"---\n#",
        b"dataset_info:\n  features: [{name: n, dtype: int64}]\n"
        b"  splits: [{name: train, num_examples: 9000, num_bytes: 1}]\n---\n#",
    ),
    **{
        f"data/train-{i:05d}-of-00003.parquet": parquet(3000 * i, 3000, row_group_size=500)
        for i in range(3)
    },
    "data/test-00000-of-00001.parquet": parquet(0, 5),
}


# Of a split of 9000 rows in three files: a range, and the files that hold it.
RANGES = {"[0:1000]": [0], "[2990:3010]": [0, 1], "[3000:6000]": [1], "[7500:]": [2]}


def test_only_the_files_that_hold_a_range_are_downloaded(tmp_path: Path) -> None:
    repositories = {f"someone/{i}": Repository(PARTS) for i in range(len(RANGES))}
    sources = [
        {"id": name, "split": f"train{rows}"}
        for name, rows in zip(repositories, RANGES, strict=True)
    ]
    with serving(Hub(repositories)) as hub:
        found = fetch(tmp_path, hub.endpoint, *sources).results
    # There are no more requests, and the same rows have the same bytes.
    again = fetch(tmp_path, None, *sources).results
    for i, (rows, parts) in enumerate(RANGES.items()):
        start, _, end = rows.strip("[]").partition(":")
        assert [row["n"] for row in found[i]["rows"]] == list(range(int(start), int(end or 9000)))
        assert found[i]["notes"] == [f"only rows {rows} of split train"]
        there = tmp_path.glob(f"hub/datasets--someone--{i}/snapshots/{COMMIT}/data/*")
        assert sorted(p.name for p in there) == [f"train-{n:05d}-of-00003.parquet" for n in parts]
        assert repositories[f"someone/{i}"].ranges("data/test-00000-of-00001.parquet") == []
        assert (again[i]["sha256"], again[i]["libraries"]) == (found[i]["sha256"], [])


def test_a_hub_that_fails_or_denies_access_is_one_line_with_the_fix(tmp_path: Path) -> None:
    told = "downloading someone/cut@cccccccc, 10.5 MB of 12.0 MB, "

    def wait_to_be_told() -> None:
        wait_for(lambda: any(told in log.read_text() for log in tmp_path.glob("*.log")))

    large = {"train.jsonl": jsonl(120, padding="x" * 100_000)}
    cut = {"files": large, "cut": {"train.jsonl": 11_000_000}, "before_cut": wait_to_be_told}
    vast = {"train.jsonl": 10**18}
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "slow": ({"n_failures": 2}, "[3]"),
        "down": ({"n_failures": 10_000}, "the hub cannot be reached (status 500); check"),
        "gated": (
            {"refused": (403, "GatedRepo"), "is_listed": True},
            "gated or private; correct the id, or get access at https://huggingface.co/datasets/",
        ),
        "private": (
            {"refused": (401, "RepoNotFound")},
            "set someone/private is not on the hub, or is",
        ),
        "gone": ({"refused": (404, "RepoNotFound")}, "set someone/gone is not on the hub, or is"),
        "closed": ({"refused": (403, None)}, "set someone/closed is not on the hub, or is"),
        "cut": (cut, "[120]"),
        "vast": ({"stated_sizes": vast}, " free, 1000000.0 TB needed for someone/vast@cccccccc; "),
    }
    served = {
        f"someone/{name}": Repository(**{"files": {"train.jsonl": jsonl(3)}, **how})
        for name, (how, _) in changes.items()
    }
    with serving(Hub(served)) as hub:
        got = fetch(tmp_path, hub.endpoint, *({"id": name} for name in served), HF_TOKEN=TOKEN)
    for (_, expected), result in zip(changes.values(), got.results, strict=True):
        message = result.get("error") or str(result["n_records"])
        assert expected in message and "\n" not in message
    slow, down, *_ = got.results
    assert 0 < slow["waited_s"] < 60 and 0 < down["waited_s"] < 60
    assert got.results[-1]["error"].endswith("free some, or set HF_HOME to another disk")
    assert served["someone/vast"].ranges("train.jsonl") == []
    # An interrupted download resumes: the client writes in blocks of 10 MiB.
    assert told in got.log
    assert served["someone/cut"].ranges("train.jsonl") == [None, f"bytes={10 << 20}-"]
    assert TOKEN not in json.dumps(got.results) + got.log


def test_a_missing_choice_is_named_with_the_available_ones(tmp_path: Path) -> None:
    files = {"README.md": CONFIGS} | {
        f"{name}/a.jsonl": jsonl(n) for name, n in (("easy", 4), ("held", 2), ("hard", 3))
    }
    (tmp_path / "own.jsonl").write_bytes(jsonl(1))
    own = CONFIGS.replace(b"easy/*.jsonl", str(tmp_path / "own.jsonl").encode())
    away = CONFIGS.replace(b"easy/*.jsonl", b"'http://127.0.0.1:9/own.jsonl'")
    repositories = {
        "someone/sums": files,
        "someone/pictures": {"train/cat/1.png": b"", "train/dog/2.png": b""},
        "someone/scripted": {"scripted.py": b"raise SystemExit(9)", "train.jsonl": jsonl(1)},
        "someone/empty": {"README.md": CARD},
        "someone/nosy": {"README.md": own, "held/a.jsonl": jsonl(1)},
        "someone/web": {"README.md": away, "held/a.jsonl": jsonl(1)},
        "someone/told": {"README.md": CARD, ".huggingface.yaml": away[4:-4], "a.jsonl": jsonl(1)},
        "someone/parts": PARTS,
    }
    easy = {"config": "easy"}
    wanted: list[tuple[dict[str, Any], str]] = [
        ({**SUMS, **easy, "split": "test"}, "2"),
        ({**SUMS, "config": "hard"}, "3"),
        ({**SUMS, "options": {"data_dir": "held"}}, "2"),
        ({**SUMS, "options": {"data_files": ["held/*.jsonl", "hard/a.jsonl"]}}, "5"),
        (SUMS, "someone/sums: config is not set; set it to one of easy, hard"),
        ({**SUMS, "config": "hrad"}, "someone/sums: config is hrad; set it to one of easy, hard"),
        ({**SUMS, "config": "hard", "split": "test"}, "has no split 'test'; use one of train"),
        ({**SUMS, "options": {"data_dir": "heldd"}}, "files under {'data_dir': 'heldd'}; correct"),
        ({**SUMS, "revision": "v9"}, "has no revision 'v9'; use a branch, tag or commit"),
        ({"id": "someone/pictures"}, "has imagefolder files; only arrow, csv, json, parquet, te"),
        ({"id": "someone/scripted"}, "read here (Dataset scripts are no longer supported"),
        ({"id": "someone/empty"}, "has no arrow/csv/json/parquet/text files; correct the op"),
        ({"id": "someone/nosy", **easy}, "refers to a file outside itself (own.jsonl), which is"),
        ({"id": "someone/web", "config": "held"}, "web refers to an address (http://127.0.0.1"),
        ({"id": "someone/told", **easy}, "told refers to an address (http://127.0.0.1:9/"),
        ({**SUMS, "options": {"data_files": "https://x.org/a"}}, "an address (https://x.org/a)"),
        ({"id": "a/b/c"}, "is no id like owner/name; correct it, or use kind local for files"),
        (
            {"id": "someone/parts", "split": "train[8000:9001]"},
            "someone/parts has 9000 rows in this split, not all of [8000:9001]",
        ),
        ({**SUMS, "split": "train[5:5]"}, "not a range of rows; write it as in train[0:1000]"),
        (
            {**SUMS, **easy, "split": "train[0:3]"},
            "sums has json files, but ranges of rows need Parquet files",
        ),
    ]
    with serving(Hub({name: Repository(f) for name, f in repositories.items()})) as hub:
        got = fetch(tmp_path, hub.endpoint, *(choice for choice, _ in wanted)).results
    for (choice, expected), result in zip(wanted, got, strict=True):
        message = result.get("error") or str(sum(result["n_records"]))
        assert expected in message, f"{choice}: {message}"
        assert "\n" not in message
    # A card that is lost later is still required.
    folder = tmp_path / "hub" / "datasets--someone--sums"
    (folder / "snapshots" / COMMIT / "README.md").unlink()
    (lost,) = fetch(tmp_path, None, {**SUMS, "split": "test"}).results
    assert "the hub cannot be reached" in lost["error"]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return caches with a complete data set, a partial one, a card, and two prepared ones."""
    home = tmp_path_factory.mktemp("caches")
    parts = {f"data/train-{i:05d}-of-00002.jsonl": jsonl(i + 2) for i in range(2)}
    short = {name: content for name, content in parts.items() if "00001" in name}
    damaged = {"train.jsonl": jsonl(6)}
    caches = {"sums": parts, "short": short, "card": {"README.md": CARD}, "damaged": damaged}
    for name, files in caches.items():
        write_hub_cache(home, files, repository=f"someone/{name}", commit=COMMIT)
    write_prepared_cache(home, 7, repository="someone/prepared", commit=COMMIT)
    folder = write_prepared_cache(home, 6, repository="someone/damaged", commit=COMMIT)
    (folder / "damaged-train.arrow").unlink()
    return home


def test_without_a_network_cached_files_are_read_and_missing_ones_reported(offline: Path) -> None:
    names = ("sums", "short", "card", "else", "damaged")
    prepared = [{"id": "someone/prepared", "revision": r} for r in (COMMIT, None, "d" * 40)]
    got = fetch(offline, None, *({"id": f"someone/{name}"} for name in names), *prepared)
    whole, part, card, unknown, damaged, *found, other = got.results
    assert whole["n_records"] == [5]
    assert whole["notes"] == ["the hub was unreachable: the cached files are assumed complete"]
    assert "part data/train-00000-of-00002.jsonl of data set someone/short is miss" in part["error"]
    assert "and the hub is unreachable; run once with a network" in card["error"]
    assert "the hub cannot be reached (ConnectError)" in unknown["error"]
    assert "someone/else@main is incomplete in" in unknown["error"]
    assert damaged["n_records"] == [6]
    assert "split train has no Arrow file" in got.log
    for one in found:
        assert (one["revision"], one["n_records"], one["waited_s"]) == (COMMIT, [7], 0)
    assert "incomplete in" in other["error"]


def test_two_fetches_at_once_make_one(tmp_path: Path) -> None:
    files = {"train.jsonl": jsonl(2000)}
    write_hub_cache(tmp_path, files, repository="someone/sums", commit=COMMIT)
    sources = SUMS, {"id": "someone/else"}
    with ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(lambda _: fetch(tmp_path, None, *sources, HF_HUB_OFFLINE="1"), range(2))
        )
    assert both[0].results[0]["sha256"] == both[1].results[0]["sha256"]
    assert sum("prepared, 2000 records" in fetched.log for fetched in both) == 1
    # A user who disabled the network is told so.
    assert all("check the network, HF_HUB_OFFLINE" in one.results[1]["error"] for one in both)


def test_a_full_disk_is_one_line_and_messages_contain_no_secret() -> None:
    with pytest.raises(
        DataError, match=r"^source s: no space left for .*: file sys.*set HF_HOME"
    ) as caught:
        with hub_errors.one_line(source()):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise ValueError("cannot write") from error
    assert "\n" not in str(caught.value)
    for text in (
        f"token {TOKEN} is bad",
        "Authorization: Bearer abc.def",
        "GET https://cdn.example/blob?Signature=abc.def&Key=1 failed",
        "https://me:abc.def@hub.example/x",
    ):
        message = hub_errors.explain_error(source(), ValueError(text))
        assert "[hidden]" in message and TOKEN not in message and "abc.def" not in message


COMMITS = ["a" * 40, "b" * 40]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def source(**changes: Any) -> SourceSpec:
    return SourceSpec(name="s", kind="hub", **{**SUMS, **changes})


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
    # Folders of prepared data sets are named like the library's.
    from datasets.naming import camelcase_to_snakecase

    for name in ("sums", "CypherBench", "Text-to-sql-v1", "aB2C", "SQLite3DB"):
        assert cache.snake_case(name) == camelcase_to_snakecase(name)


def test_a_card_states_its_license(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    for head, license in (
        ("license: mit", "mit"),
        ("license:\n- mit\n- cc-by-4.0", "mit, cc-by-4.0"),
        ("license: other\nlicense_name: stack-terms", "stack-terms"),
        ("license: other", "other"),
        *((other, None) for other in ("title: x", "license: [", "day: 2024-02-30", "just text")),
    ):
        card.write_text(f"---\n{head}\n---\n# Title\nlicense: wrong\n")
        assert cache.card_license(cache.front_matter(card)) == license


def test_only_the_prepared_commit_is_found(home: Path) -> None:
    for commit in COMMITS:
        write_prepared_cache(home, 5, repository="someone/sums", commit=commit)
    found = cache.find_source(source(revision=COMMITS[1]))
    assert found is not None and found.commit == COMMITS[1]
    assert found.n_records_by_split == {"train": 5}
    for other in ("c" * 40, "v2"):
        assert cache.find_source(source(revision=other)) is None
    # Two commits and no indication which is meant: neither is used.
    assert cache.find_source(source()) is None
    write_hub_cache(home, {"README.md": CARD}, repository="someone/sums", commit=COMMITS[0])
    newest = cache.find_source(source())
    assert newest is not None and newest.commit == COMMITS[0]
    revisions = [cache.find_revision("someone/sums", r) for r in (None, COMMITS[1], "v2")]
    assert revisions == [*COMMITS, None]


def test_configs_and_options_are_separate(home: Path) -> None:
    write_prepared_cache(home, 1, repository="someone/sums", commit=COMMITS[0], config="hard")
    assert cache.find_source(source()) is None
    assert cache.find_source(source(config="hard")) is not None
    assert cache.find_source(source(config="hard", options={"data_dir": "a"})) is None
    a, b = {"config_name": "a"}, {"config_name": "b"}
    for configs, expected in (
        ([a], "a"), ([a, b], "default"), ([a, {**b, "default": True}], "b"), ("broken", "default"),
    ):  # fmt: skip
        assert cache.default_config({"configs": configs}) == expected


def test_a_splits_files_are_recognized_by_name(home: Path) -> None:
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
