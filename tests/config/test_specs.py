"""What the rules are told: each what it uses, and nothing more."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from test_load import base, load

from expertflow.config.house import House
from expertflow.config.specs import deduplicate_spec, prepare_spec, source_specs
from expertflow.core.errors import ConfigError
from expertflow.core.files import sha256_text
from expertflow.core.records import to_json
from expertflow.data.settings import PrepareSpec


def spec(tmp_path: Path, content: dict[str, str] | None = None, **data: Any) -> PrepareSpec:
    expert = load(tmp_path, {**base(), "data": data})
    return prepare_spec(expert, source_specs(expert)[0], content or {})


def test_documents_do_not_depend_on_how_they_are_judged_later(tmp_path: Path) -> None:
    one = spec(tmp_path, near_duplicates={"threshold": 0.7}, max_rejected_fraction=0.1)
    assert one == spec(tmp_path, near_duplicates={"threshold": 0.9}, max_rejected_fraction=0.2)
    assert to_json(one)["near"] == {"n_words": 5, "n_permutations": 128}
    assert spec(tmp_path).near is None


@pytest.mark.parametrize("written", ["b.jsonl", "./b.jsonl", "data//b.jsonl"])
def test_a_benchmarks_content_counts_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / "experts").mkdir(parents=True)
    Path(written).parent.mkdir(exist_ok=True)
    Path(written).write_text("{}\n")
    manifest = {**base(), "data": {"benchmarks": [{"path": written, "text": "{q}"}]}}
    (tmp_path / "config" / "experts" / "e.yaml").write_text(yaml.safe_dump(manifest))
    house = House(config={"experts": {"e": {}}}, basedir=ROOT, main=True)

    class Wildcards:
        expert = "e"
        source = "s"

    assert sha256_text("{}\n") in house.spec("prepare_shard", Wildcards)


def test_a_benchmark_without_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"benchmarks names .*b.jsonl, which is not there"):
        spec(tmp_path, benchmarks=[{"path": str(path), "text": "{q}"}])


def test_categories_are_texts(tmp_path: Path) -> None:
    source = {**base()["sources"][0], "category": "c"}
    caps = {0: 3, 1.5: 4, 2.0: 5, "x": 6}
    value = {**base(), "sources": [source], "data": {"max_per_category": caps}}
    expert = load(tmp_path, value)
    assert deduplicate_spec(expert).category_caps == {"0": 3, "1.5": 4, "2": 5, "x": 6}
