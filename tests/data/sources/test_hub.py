"""The hub source against a hub on loopback, and against caches laid out as the libraries do."""

import errno
import json
import os
import subprocess
import sys
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

from expertflow.core.errors import DataError
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


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach loopback directly, whatever leads from this machine to others."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


SOURCE = SourceSpec(name="s", kind="hub", **SUMS)


def lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def test_a_data_set_is_pinned_fetched_and_then_read_offline(tmp_path: Path) -> None:
    files = {"README.md": CARD, "train.jsonl": jsonl(30), "test.jsonl": jsonl(3)}
    with serving(Hub({"someone/sums": Repository(files)})) as hub:
        online = fetch(tmp_path, hub.endpoint, SUMS)
    (first,) = online.results
    assert first["revision"] == COMMIT
    assert first["rows"] == lines(files["train.jsonl"])
    assert first["card_license"] == "cc0-1.0"
    assert "someone/sums@cccccccc: downloading 2 files, 0.0 MB" in online.log
    assert "\r" not in online.log and "HTTP Request" not in online.log
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        (again,) = fetch(tmp_path, None, SUMS, **environment).results
        # Not even loaded, so nothing can have been asked of the network.
        assert again["libraries"] == []
        assert {**again, "libraries": None} == {**first, "libraries": None}
    # A user of the library can read it from the same cache.
    code = "import datasets, json; d = datasets.load_dataset('someone/sums', split='train');"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{code} print(json.dumps(d.to_list()))"],
        env={**clean, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
    )
    assert json.loads(done.stdout) == lines(files["train.jsonl"])


def test_a_cut_download_shows_how_far_it_is_and_goes_on_there(tmp_path: Path) -> None:
    content = jsonl(120, padding="x" * 100_000)
    repository = Repository({"train.jsonl": content}, cut={"train.jsonl": 11_000_000})
    with serving(Hub({"someone/sums": repository})) as hub:
        got = fetch(tmp_path, hub.endpoint, SUMS)
    assert got.results[0]["n_records"] == [120]
    assert "someone/sums@cccccccc: 10.5 MB of 12.0 MB\n" in got.log
    # The client writes in blocks of 10 MiB; what it had of the second one is asked for again.
    assert repository.ranges("train.jsonl") == [None, f"bytes={10 << 20}-"]


def test_files_that_arrived_are_not_fetched_again(tmp_path: Path) -> None:
    files = {"README.md": CARD, "train-a.jsonl": jsonl(5), "train-b.jsonl": jsonl(6)}
    repository = Repository(files)
    with serving(Hub({"someone/sums": repository})) as hub:
        fetch(tmp_path, hub.endpoint, SUMS)
        folder = tmp_path / "hub" / "datasets--someone--sums"
        lost = folder / "snapshots" / COMMIT / "train-b.jsonl"
        lost.resolve().unlink()
        (tmp_path / "datasets" / "someone___sums").rename(tmp_path / "gone")
        repository.requests.clear()
        (got,) = fetch(tmp_path, hub.endpoint, SUMS).results
    assert got["n_records"] == [11]
    assert {name for _, name, _ in repository.requests} == {"train-b.jsonl"}


def test_a_hub_that_fails_for_a_while_is_asked_again(tmp_path: Path) -> None:
    broken = {
        "someone/slow": Repository({"train.jsonl": jsonl(3)}, n_failures=2),
        "someone/down": Repository({"train.jsonl": jsonl(3)}, n_failures=10_000),
    }
    with serving(Hub(broken)) as hub:
        slow, down = fetch(
            tmp_path, hub.endpoint, {"id": "someone/slow"}, {"id": "someone/down"}
        ).results
    assert slow["n_records"] == [3]
    assert slow["waited_s"] > 0
    assert "hub fails for someone/down (status 500) after 3 tries; try later" in down["error"]
    assert down["waited_s"] < 60


def test_a_choice_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    files = {"README.md": CONFIGS} | {
        f"{name}/a.jsonl": jsonl(n) for name, n in (("easy", 4), ("held", 2), ("hard", 3))
    }
    images = {"train/cat/1.png": b"", "train/dog/2.png": b""}
    (tmp_path / "own.jsonl").write_bytes(jsonl(1))
    own = CONFIGS.replace(b"easy/*.jsonl", str(tmp_path / "own.jsonl").encode())
    away = CONFIGS.replace(b"easy/*.jsonl", b"'http://127.0.0.1:9/own.jsonl'")
    repositories = {
        "someone/sums": files,
        "someone/pictures": images,
        "someone/scripted": {"scripted.py": b"raise SystemExit(9)", "train.jsonl": jsonl(1)},
        "someone/empty": {"README.md": CARD},
        "someone/nosy": {"README.md": own, "held/a.jsonl": jsonl(1)},
        "someone/web": {"README.md": away, "held/a.jsonl": jsonl(1)},
    }
    wanted: list[tuple[dict[str, Any], str]] = [
        ({**SUMS, "config": "easy", "split": "test"}, "2"),
        ({**SUMS, "config": "hard"}, "3"),
        ({**SUMS, "options": {"data_dir": "held"}}, "2"),
        ({**SUMS, "options": {"data_files": ["held/*.jsonl", "hard/a.jsonl"]}}, "5"),
        (SUMS, "someone/sums has several configs; set config to one of easy, hard"),
        ({**SUMS, "config": "hrad"}, "has no config 'hrad'; use one of easy, hard"),
        ({**SUMS, "config": "hard", "split": "test"}, "has no split 'test'; use one of train"),
        ({**SUMS, "options": {"data_dir": "heldd"}}, "files under data_dir 'heldd'; correct data_"),
        ({**SUMS, "revision": "v9"}, "has no revision 'v9'; use a branch, tag or commit"),
        ({"id": "someone/pictures"}, "holds imagefolder files; only arrow, csv, json, parquet, te"),
        ({"id": "someone/scripted"}, "made by a script of its own, which is never run"),
        ({"id": "someone/empty"}, "holds no arrow/csv/json/parquet/text files; use another data"),
        (
            {"id": "someone/nosy", "config": "easy"},
            "names a file outside of itself (own.jsonl); it is no",
        ),
        ({"id": "someone/web", "config": "easy"}, "someone/web names an address, or files that"),
        ({"id": "a/b/c"}, "'a/b/c' is no data set id; write it as owner/name"),
    ]
    with serving(Hub({name: Repository(f) for name, f in repositories.items()})) as hub:
        got = fetch(tmp_path, hub.endpoint, *(choice for choice, _ in wanted)).results
    for (choice, expected), result in zip(wanted, got, strict=True):
        said = result.get("error") or str(sum(result["n_records"]))
        assert expected in said, f"{choice}: {said}"
        assert "\n" not in said


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "GatedRepo", "is gated; accept its terms at https://huggingface.co/datasets/someone"),
        (401, "RepoNotFound", "no data set 'someone/sums' on the hub, or it is private"),
        (404, "RepoNotFound", "no data set 'someone/sums' on the hub, or it is private"),
        (403, None, "does not let this token read someone/sums"),
    ],
)
def test_a_refusal_names_the_fix_and_never_the_token(
    tmp_path: Path, status: int, code: str | None, expected: str
) -> None:
    files = {"train.jsonl": jsonl(3)}
    refusing = Repository(files, refused=(status, code), is_listed=code == "GatedRepo")
    with serving(Hub({"someone/sums": refusing})) as hub:
        got = fetch(tmp_path, hub.endpoint, SUMS, HF_TOKEN=TOKEN)
    assert expected in got.results[0]["error"]
    assert TOKEN not in json.dumps(got.results) + got.log


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_network_downloaded_files_are_prepared(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    parts = {f"data/train-{i:05d}-of-00002.jsonl": jsonl(i + 2) for i in range(2)}
    write_hub_cache(tmp_path, parts, repository="someone/sums", commit=COMMIT)
    short = {name: content for name, content in parts.items() if "00001" in name}
    write_hub_cache(tmp_path, short, repository="someone/short", commit=COMMIT)
    write_hub_cache(tmp_path, {"README.md": CARD}, repository="someone/card", commit=COMMIT)
    others = [{"id": f"someone/{name}"} for name in ("short", "card", "else")]
    got = fetch(tmp_path, None, SUMS, *others, **environment)
    whole, part, card, unknown = got.results
    assert whole["n_records"] == [5]
    assert whole["notes"] == ["the hub was out of reach: the cached files are taken to be all"]
    assert "part data/train-00000-of-00002.jsonl of data set someone/short is miss" in part["error"]
    assert "and the hub is out of reach; run once with a network" in card["error"]
    reason = "HF_HUB_OFFLINE is set" if environment else "the hub cannot be reached (ConnectError)"
    assert reason in unknown["error"] and "someone/else@main is not complete in" in unknown["error"]


def test_a_prepared_data_set_alone_is_enough_but_for_no_other_commit(tmp_path: Path) -> None:
    write_prepared_cache(tmp_path, 7, repository="someone/sums", commit=COMMIT)
    wanted = [{**SUMS, "revision": revision} for revision in (COMMIT, None, "d" * 40)]
    *found, other = fetch(tmp_path, None, *wanted).results
    for got in found:
        assert (got["revision"], got["n_records"], got["waited_s"]) == (COMMIT, [7], 0)
    assert "not complete in" in other["error"]


def test_two_fetches_at_once_make_one(tmp_path: Path) -> None:
    files = {"train.jsonl": jsonl(2000)}
    write_hub_cache(tmp_path, files, repository="someone/sums", commit=COMMIT)
    offline = {"HF_HUB_OFFLINE": "1"}
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: fetch(tmp_path, None, SUMS, **offline), range(2)))
    assert both[0].results[0]["sha256"] == both[1].results[0]["sha256"]
    assert sum("prepared, 2000 records" in fetched.log for fetched in both) == 1


def test_a_listed_card_that_is_lost_is_not_done_without(tmp_path: Path) -> None:
    files = {"README.md": CONFIGS, "easy/a.jsonl": jsonl(1), "held/a.jsonl": jsonl(1)}
    with serving(Hub({"someone/sums": Repository(files)})) as hub:
        fetch(tmp_path, hub.endpoint, {**SUMS, "config": "easy"})
    folder = tmp_path / "hub" / "datasets--someone--sums"
    (folder / "snapshots" / COMMIT / "README.md").unlink()
    (got,) = fetch(tmp_path, None, {**SUMS, "split": "test"}).results
    assert "the hub cannot be reached" in got["error"]


def test_a_damaged_prepared_folder_is_made_again(tmp_path: Path) -> None:
    files = {"train.jsonl": jsonl(6)}
    write_hub_cache(tmp_path, files, repository="someone/sums", commit=COMMIT)
    folder = write_prepared_cache(tmp_path, 6, repository="someone/sums", commit=COMMIT)
    (folder / "sums-train.arrow").unlink()
    got = fetch(tmp_path, None, SUMS)
    assert got.results[0]["n_records"] == [6]
    assert "split train has no Arrow file" in got.log


def test_a_download_that_does_not_fit_is_refused_before(tmp_path: Path) -> None:
    vast = Repository({"train.jsonl": jsonl(1)}, stated_sizes={"train.jsonl": 10**18})
    with serving(Hub({"someone/sums": vast})) as hub:
        error = fetch(tmp_path, hub.endpoint, SUMS).results[0]["error"]
    assert "source s: someone/sums needs 1000000000000.0 MB and " in error
    assert error.endswith("free some, or set HF_HOME to another disk")
    assert vast.ranges("train.jsonl") == []


def test_a_disk_that_fills_up_ends_in_one_line() -> None:
    with pytest.raises(DataError, match=r"^source s: no space left for .*set HF_HOME") as caught:
        with hub_errors.one_line(SOURCE):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise ValueError("cannot write") from error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"token {TOKEN} is bad",
        "Authorization: Bearer abc.def",
        "GET https://cdn.example/blob?Signature=abc.def&Key=1 failed",
        "https://me:abc.def@hub.example/x",
    ],
)
def test_quoted_texts_hold_no_secret(text: str) -> None:
    said = hub_errors.explain_error(SOURCE, ValueError(text))
    assert "[hidden]" in said and TOKEN not in said and "abc.def" not in said
