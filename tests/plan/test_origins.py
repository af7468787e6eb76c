"""Every setting of a plan says where its value comes from."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_fixtures import plan as plan_for
from plan_fixtures import reasons_of

from expertflow.config.load import describe_origins, load_expert
from expertflow.core.errors import ConfigError
from expertflow.plan.settings import Training
from expertflow.plan.show import plan_text

MANIFEST: dict[str, Any] = {
    **{"description": "d", "model": "builtin:tiny-qwen3", "evaluation": {"task": "held_out_loss"}},
    "sources": [{"name": "mine", "kind": "local", "path": "a.jsonl", "text": "{a}"}],
    "training": {"learning_rate": 1e-3, "seed": 3, "weight_decay": 0.1, "save_steps": 7},
    "demo": {"training": {"seed": 4, "weight_decay": 0.2}},
}


def loaded(folder: Path, manifest: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    (folder / "mine.yaml").write_text(yaml.safe_dump(manifest or MANIFEST), encoding="utf-8")
    settings = {"preset": "demo", "training": {}, "experts": {"mine": {}}, **config}
    told = settings.pop("told", {})
    return load_expert("mine", folders=[folder], config=settings, told=told)


def test_the_last_to_name_a_setting_is_its_origin(tmp_path: Path) -> None:
    overlay = {"seed": "overlay", "weight_decay": "overlay"}
    own = {"learning_rate": "manifest", "save_steps": "manifest"}
    assert loaded(tmp_path)["setting_origins"] == own | overlay
    full = loaded(tmp_path, preset="full")["setting_origins"]
    assert set(full.values()) == {"manifest"}
    both = {"learning_rate": 1e-2, "seed": 5}
    made = loaded(tmp_path, training=both, told={"training": {"seed": 5}})["setting_origins"]
    assert (made["learning_rate"], made["seed"]) == ("overlay", "command line")
    mine = {"mine": {"training": {"save_steps": 9}}}
    made = loaded(tmp_path, experts=mine, told={"experts": mine})["setting_origins"]
    assert made["save_steps"] == "command line"


def test_a_plan_says_what_is_given_and_what_is_computed() -> None:
    origins = {"learning_rate": "manifest", "save_steps": "command line"}
    origins["num_train_epochs"] = "overlay"
    plan = plan_for(None, origins=origins, gradient_accumulation_steps=1)
    assert set(plan.origins) == set(Training.__struct_fields__)
    assert plan.origins["learning_rate"] == "manifest"
    assert plan.origins["weight_decay"] == "default"
    assert plan.origins["batch_size"] == plan.origins["eval_steps"] == "computed"
    told = reasons_of(plan)
    assert told["save_steps"].origin == "command line"
    assert told["save_steps"].because.startswith("save_steps of the command line")
    assert told["gradient_accumulation_steps"].because.endswith("by default")
    assert told["n_steps"].origin == "computed"
    text = plan_text(plan)
    assert "manifest: learning_rate 0.001" in text and "overlay: num_train_epochs" in text


def test_a_manifest_states_where_its_values_come_from(tmp_path: Path) -> None:
    public = {"from": "public", "why": "the recipe's own"}
    origins = {"training.learning_rate": public, "sources.mine.text": {"from": "own"}}
    loaded(tmp_path, {**MANIFEST, "origins": origins})
    text = describe_origins(tmp_path / "mine.yaml")
    assert "training.learning_rate 0.001: a public recipe has it; the recipe's own" in text
    assert "sources.mine.text {a}: chosen here" in text


def test_a_wrong_statement_is_refused(tmp_path: Path) -> None:
    for name, origin, said in (
        ("training.learning_rat", {"from": "own"}, "did you mean 'training.learning_rate'"),
        ("export.dtype", {"from": "own"}, "'export.dtype', which is not set here"),
        ("training.seed", {"from": "nobody"}, "'nobody': it must be one of"),
        ("training.seed", {"why": "x"}, "from' is missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            loaded(tmp_path, {**MANIFEST, "origins": {name: origin}})
