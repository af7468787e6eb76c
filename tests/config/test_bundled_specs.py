"""What the rules are told where a bundle was opened: what is no setting reruns nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import ROOT
from test_load import base, load

from expertflow.config.hardware_tables import HardwareTables
from expertflow.config.opened import Case
from expertflow.config.rule_specs import RuleSpecs
from expertflow.data.lock import HashCache
from expertflow.rental.bundle.records import BundleIndex, BundleSpec, Opened
from expertflow.tokens.records import TokenSpec

MODEL = "~/a model"


def told(folder: Path, rule: str, bundle: BundleSpec | None = None, **changes: Any) -> Any:
    """Give what a rule is told, where ``bundle`` was opened."""
    manifest = {**base(), "model": MODEL, **changes}
    manifest.pop("builtin", None)
    expert = load(folder, manifest)
    case = Case(config={}, directories=[], hardware=cast(HardwareTables, None))
    if bundle is not None:
        index = BundleIndex(format=2, kind="bundle", expert="e", code={}, members=(), spec=bundle)
        case = replace(case, bundle=Opened(index=index, settings_here=None))
    specs = RuleSpecs(
        case=lambda _: case,
        expert=lambda _: expert,
        scripts=ROOT / "workflow" / "scripts",
        hashes=HashCache(folder / "hashes.json"),
        main=False,
    )
    return json.loads(specs.text(rule, SimpleNamespace(expert="e")))


def made_by(**changes: Any) -> BundleSpec:
    settings: dict[str, Any] = {
        "expert": "e", "config": {}, "files": {}, "content": {}, "artefacts": {},
        "own_artefacts": {}, "tokens": TokenSpec(engine="auto", versions={"tokenizers": "0.1"}),
        "code": {}, "with_weights": False,
    }  # fmt: skip
    return BundleSpec(**{**settings, **changes})


def home(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Go to a home with a model in it."""
    model = folder / "a model"
    model.mkdir(parents=True, exist_ok=True)
    for name, text in {"tokenizer": "t", "config": "c", **files}.items():
        (model / f"{name}.json").write_text(text)
    (model / "model.safetensors").write_text("weights")
    monkeypatch.setenv("HOME", str(folder))


def test_engines_that_did_not_tokenise_do_not_count(tmp_path: Path) -> None:
    own = told(tmp_path, "pretokenize_shard")
    assert own["versions"] != {"tokenizers": "0.1"}
    bundled = told(tmp_path, "pretokenize_shard", made_by())
    assert bundled == {**own, "versions": {"tokenizers": "0.1"}}
    other = told(tmp_path, "pretokenize_shard", made_by(), data={"token_engine": "tokenizers"})
    assert other["engine"] == "tokenizers"


def test_a_models_home_is_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home(tmp_path / "one", monkeypatch)
    one = told(tmp_path, "prepare_model")
    assert set(one["content"]) == {
        f"{MODEL}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    home(tmp_path / "another", monkeypatch)
    (tmp_path / "another" / "a model" / "README.md").write_text("read by nobody")
    assert told(tmp_path, "prepare_model") == one
    home(tmp_path / "another", monkeypatch, config="changed")
    assert told(tmp_path, "prepare_model") != one


def test_what_came_bundled_with_a_model_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home(tmp_path, monkeypatch)
    made = told(tmp_path, "prepare_model")
    bundle = made_by(content={MODEL: made["content"]})
    home(tmp_path, monkeypatch, config="changed", generation_config="new")
    assert told(tmp_path, "prepare_model", bundle) == made
    home(tmp_path, monkeypatch, tokenizer="another")
    assert told(tmp_path, "prepare_model", bundle) != made
