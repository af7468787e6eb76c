"""The catalog of data sets, for the project's own config and made-up ones."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback_hub import write_hub_cache, write_prepared_cache
from manifests import base
from support import run_script

from expertflow.config.catalog import build_catalog, scan_caches

COMMIT = "a" * 40
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def write_config(folder: Path, experts: dict[str, list[dict[str, Any]]]) -> None:
    (folder / "config" / "experts").mkdir(parents=True)
    settings = {"preset": "demo", "experts": dict.fromkeys(experts)}
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(settings))
    for name, sources in experts.items():
        manifest = {**base(), "sources": [{"text": "{q}", **source} for source in sources]}
        (folder / "config" / "experts" / f"{name}.yaml").write_text(yaml.safe_dump(manifest))


def test_caches_are_listed_and_a_faulty_manifest_hides_nothing(home: Path) -> None:
    files = {"README.md": b"---\n---\n", "data/train.jsonl": b"x" * 100}
    write_hub_cache(home, files, repository="someone/Sums", commit=COMMIT)
    write_prepared_cache(home, 5, repository="someone/sums", commit=COMMIT)
    write_prepared_cache(home, 7, repository="other/facts", commit="b" * 40)
    broken = write_hub_cache(home, {"a": b"1"}, repository="bad/one", commit=COMMIT)
    (broken / "refs" / "v1").write_text("b" * 40)
    (home / "hub" / "models--x--y" / "snapshots").mkdir(parents=True)
    report = scan_caches()
    facts, sums = report["datasets"]
    (prepared,) = sums["prepared"]
    assert (sums["id"], sums["commits"]) == ("someone/Sums", [COMMIT])
    assert sums["n_bytes"] == 108 + prepared["n_bytes"] > 108
    assert (prepared["config"], prepared["n_records_by_split"]) == ("default", {"train": 5})
    assert (facts["id"], facts["commits"]) == ("other/facts", []) and facts["n_bytes"] > 0
    assert len(report["damaged"]) == 1 and "bad--one" in report["damaged"][0]
    good = [{"name": "l", "kind": "local", "path": "no.jsonl"}]
    write_config(home.parent, {"good": good, "bad": [{"name": "x", "kind": "hub"}]})
    found = build_catalog()
    assert [source["status"] for source in found["sources"]] == ["missing"]
    assert found["problems"] and all("bad.yaml" in text for text in found["problems"])


def test_each_kind_reports_what_is_here(home: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"q": ["a", "b", "c"]}), "rows.Parquet")
    Path("deep/down").mkdir(parents=True)
    for name in ("lines.jsonl", "deep/down/lines.jsonl"):
        Path(name).write_text('{"q": "a"}\n')
    card = {"README.md": b"---\nlicense: cc0-1.0\n---\n", "a.jsonl": b"{}"}
    write_hub_cache(home, card, repository="someone/sums", commit=COMMIT)
    write_prepared_cache(home, 7, repository="someone/sums", commit=COMMIT)
    write_hub_cache(home, card, repository="someone/raw", commit=COMMIT)
    rows = {"name": "p", "kind": "local", "path": "rows.Parquet"}
    lines = {"name": "l", "kind": "local", "path": "**/lines.jsonl", "license": "mit"}
    sums, raw = ({"name": n, "kind": "hub", "id": f"someone/{n}"} for n in ("sums", "raw"))
    write_config(home.parent, {"e": [rows, lines, sums], "f": [sums, raw]})
    catalog = build_catalog()
    assert catalog["problems"] == []
    found = {source["location"]: source for source in catalog["sources"]}
    keys = ("status", "n_records", "license", "license_origin")
    listed = {name: tuple(source[key] for key in keys) for name, source in found.items()}
    assert listed == {
        "rows.Parquet": ("found", 3, None, None),
        "**/lines.jsonl": ("found", None, "mit", "manifest"),
        "someone/sums": ("prepared", 7, "cc0-1.0", "card"),
        "someone/raw": ("downloaded", None, "cc0-1.0", "card"),
    }
    assert found["**/lines.jsonl"]["n_bytes"] == 22
    used = found["someone/sums"]["used_by"]
    assert used == [{"expert": name, "presets": ["demo", "full"]} for name in ("e", "f")]


def test_the_script_alone_needs_no_argument_and_no_snakemake(home: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "COLUMNS": "80"}
    shown = run_script("find_datasets", env=environment, cwd=home.parent)
    assert shown.returncode == 0, shown.stderr
    assert "no data set in the Hugging Face caches" in shown.stdout
    assert "gretelai/synthetic_text_to_sql" in shown.stdout
    write_prepared_cache(home, 7, repository="someone/sums", commit=COMMIT)
    printed = run_script("find_datasets", "--json", env=environment, cwd=home.parent)
    value = json.loads(printed.stdout)
    assert sorted(value) == ["cache", "problems", "sources"]
    assert value["cache"]["datasets"][0]["prepared"][0]["n_records_by_split"] == {"train": 7}
    missing = [source for source in value["sources"] if source["status"] == "missing"]
    assert missing and all(source["n_bytes"] is None for source in missing)
    assert TOKEN not in shown.stdout + shown.stderr + printed.stdout + printed.stderr
