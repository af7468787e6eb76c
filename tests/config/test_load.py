import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from expertflow.config.contradictions import OF_MESSAGES
from expertflow.config.load import WORDS, convert_scalars, load_config, load_expert
from expertflow.config.validate import FORMER_NAMES, read_schema
from expertflow.core.errors import ConfigError


def base() -> dict[str, Any]:
    return {
        "description": "d",
        "model": "builtin:tiny-qwen3",
        "sources": [{"name": "s", "kind": "local", "path": "x.jsonl", "text": "{body}"}],
        "evaluation": {"task": "held_out_loss"},
    }


def load(tmp_path: Path, value: dict[str, Any], **config: Any) -> dict[str, Any]:
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(value))
    settings = load_config({"experts": {"e": {}}, **config})
    return load_expert("e", folders=[tmp_path], config=settings)


def test_later_settings_win(tmp_path: Path) -> None:
    value = {**base(), "training": {"learning_rate": 1.0, "batch_size": 1, "seed": 1}}
    value["demo"] = {"training": {"learning_rate": 2.0, "batch_size": 2}}
    full = load(tmp_path, value, preset="full")["training"]
    demo = load(tmp_path, value)["training"]
    own = {"e": {"training": {"batch_size": 4}}}
    over = load(tmp_path, value, training={"learning_rate": 3.0}, experts=own)["training"]
    assert (full["learning_rate"], full["batch_size"]) == (1.0, 1)
    assert (demo["learning_rate"], demo["batch_size"], demo["seed"]) == (2.0, 2, 1)
    assert (over["learning_rate"], over["batch_size"]) == (3.0, 4)


def test_a_json_manifest_does_as_well_and_an_unknown_one_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "expert-sql.json").write_text(json.dumps(base()))
    settings = load_config({"experts": {}})
    expert = load_expert("expert-sql", folders=[tmp_path], config=settings)
    assert expert["model"] == "builtin:tiny-qwen3"
    with pytest.raises(ConfigError, match="did you mean 'expert-sql'"):
        load_expert("expert-sqk", folders=[tmp_path], config=settings)


def test_scalars_of_the_command_line_get_their_type() -> None:
    # A commit's id that looks like a number stays a text.
    texts = ["3e-6", "true", "null", "x", "1e", "1234e56", "1.5e3"]
    assert convert_scalars({"a": texts}, words=WORDS) == {
        "a": [3e-6, True, None, "x", "1e", "1234e56", 1500.0]
    }


SOURCE = {"name": "s", "kind": "local", "path": "x.jsonl"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"learning_rate": 0}}, "'training.learning_rate' is 0: it must be above 0"),
        ({"training": {"bf16": True, "fp16": True}}, "training.bf16 and fp16 are both true"),
        ({"data": {"eval_fraction": 0}}, "'data.eval_fraction' is 0: it must be above 0"),
        ({"sources": []}, "'sources' is .*it needs at least 1 item"),
        ({"sources": [{"name": "s", "kind": "hub", "text": "{a}"}]}, "lacks 'id'; add it"),
        ({"sources": [{"name": "s", "kind": "local", "path": "x"}]}, "with prompt and completion"),
        ({"sources": base()["sources"] * 2}, "two sources are named 's'"),
        ({"training": {"warmup_steps_min": 9, "warmup_steps_max": 3}}, "above warmup_steps_max 3"),
        ({"training": {"max_steps": 5, "override_min_warmup": False}}, "10 is not below max_steps"),
        ({"training": {"max_steps": 1, "target_tokens": 1}}, "are both set; drop one"),
        ({"training": {"min_epochs": 1}}, "min_epochs bounds target_tokens, which is not set"),
        ({"training": {"lora": {"targets": ["lm_head"]}}}, "names lm_head"),
        ({"evaluation": {"task": "exact_match"}}, "asks questions and source s has none"),
        ({"training": {"min_delta": 0.1}}, "min_delta has no effect without patience"),
        ({"training": {"use_sdpa": False, "attention": "flex"}}, "use_sdpa is false and attention"),
        ({"training": {"parallel": "fsdp", "optim": "adamw_8bit"}}, "states of optim adamw_8bit"),
        ({"evaluation": {"task": "exact_match", "backend": "x"}}, "'evaluation.backend'; transf"),
        # An old name means something only where the new one belongs.
        ({"decoding": {"lora_r": 4}}, "'decoding.lora_r'; known keys are stop"),
        ({"sources": [{**SOURCE, "prompt": "{q}"}]}, "'sources.0' has kind, name, path, prompt: "),
    ],
)
def test_a_fault_is_one_line_with_file_key_value_and_fix(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, {**base(), **change})
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "e.yaml") in str(caught.value)


def source(**keys: Any) -> dict[str, Any]:
    """Return a source of some kind, with keys of its template."""
    generated = {"generator": "facts", "n_documents": 9}
    places = {"local": {"path": "x"}, "git": {"path": "x"}, "hub": {"id": "x/y"}}
    kind = keys.get("kind", "local")
    whole = {} if {"messages", "text"} & set(keys) else {"text": "{a}"}
    return {"name": "src", "kind": kind, **places.get(kind, generated), **whole, **keys}


SQL = {"field": "a", "check": "sql", "dialect": "sqlit"}
IDLE = [
    ({"prompt": "{q}"}, "prompt has no effect beside text; remove one"),
    ({"messages": "m", "completion": "{q}"}, "completion has no effect beside messages"),
    *(({key: "x"}, f"{key} has no effect without messages") for key in OF_MESSAGES[:-1]),
    ({"roles": {"x": "user"}}, "roles has no effect without messages"),
    ({"kind": "hub", "path": "x"}, "path is read of git and local sources only, not of hub"),
    *(
        ({"kind": "git", key: "x"}, f"{key} is read of hub sources only, not of git; remove it")
        for key in ("id", "revision", "config", "split")
    ),
    *(
        ({key: value}, f"{key} is read of generated sources only, not of local")
        for key, value in (("generator", "facts"), ("n_documents", 9), ("seed", 0))
    ),
    ({"kind": "hub", "options": {"data_file": "x"}}, "options.data_file: unknown; use"),
    ({"kind": "generated", "options": {"ref": "x"}}, "this kind of source has no options"),
    ({"text": "{q!r}"}, "text: template '{q!r}': !r has no effect; write {q}"),
    ({"text": "{q:xml}"}, "text: template '{q:xml}': no format 'xml'"),
    ({"checks": [SQL]}, "check sql of 'a': dialect 'sqlit'"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), IDLE)
def test_a_key_that_would_do_nothing_is_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, {**base(), "sources": [source(**keys)]})
    line = str(caught.value)
    assert str(tmp_path / "e.yaml") in line and "source src" in line and "\n" not in line


def test_keys_that_say_nothing_or_something_are_let_through(tmp_path: Path) -> None:
    idle = source(revision=None, roles={}, options={})
    chat = source(messages="m", tools="t", roles={"x": "user"})
    assert load(tmp_path, {**base(), "sources": [idle, {**chat, "name": "chat"}]})


def test_a_cap_by_category_needs_a_category(tmp_path: Path) -> None:
    value = {**base(), "data": {"max_per_category": 5}}
    with pytest.raises(ConfigError, match=r"max_per_category has no effect.*add category"):
        load(tmp_path, value)
    assert load(tmp_path, {**value, "sources": [source(category="c")]})


def test_a_template_of_a_benchmark_is_checked(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    benchmark = {"path": str(tmp_path / "b"), "text": "{q"}
    with pytest.raises(ConfigError, match=r"e.yaml .*: benchmark .*/b: template '{q'"):
        load(tmp_path, {**base(), "data": {"benchmarks": [benchmark]}})


def test_a_demo_block_is_checked_and_is_no_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'modle'"):
        load(tmp_path, {**base(), "demo": {"modle": "x"}})
    with pytest.raises(ConfigError, match=r"experts\.e\.demo has no effect"):
        load(tmp_path, base(), experts={"e": {"demo": {}}})


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("config/experts/*"), *ROOT.glob("docs/examples/*.yaml")]),
    ids=lambda p: p.stem,
)
@pytest.mark.parametrize("preset", ["demo", "full"])
def test_every_shipped_manifest_loads(path: Path, preset: str) -> None:
    config = load_config({"experts": {path.stem: {}}, "preset": preset})
    expert = load_expert(path.stem, folders=[path.parent], config=config)
    assert expert["description"]


def test_numbers_inside_an_object_of_the_command_line_are_numbers() -> None:
    """Snakemake reads ``--config 'training={max_steps: 30}'`` as an object of texts."""
    sources = [{"name": "1.5", "kind": "hub", "id": "a/b", "revision": "1234567", "text": "{t}"}]
    own = {"training": {"logging_steps": "5"}, "sources": [*sources, {"revision": "1.0"}]}
    given = {"training": {"max_steps": "30", "max_usd": "2.5"}, "experts": {"e": own}}
    settings = load_config(given)
    assert (settings["training"]["max_steps"], settings["training"]["max_usd"]) == (30, 2.5)
    expert = settings["experts"]["e"]
    assert expert["training"]["logging_steps"] == 5
    assert [source["revision"] for source in expert["sources"]] == ["1234567", "1.0"]


def test_a_duration_without_quotes_is_told_to_be_quoted(tmp_path: Path) -> None:
    claims = [{"text": "t", **yaml.safe_load("duration: 46:47")}]
    with pytest.raises(ConfigError, match=r"the number 2807, .*quote it"):
        load(tmp_path, {**base(), "claims": claims})


def below(node: dict[str, Any], path: str) -> bool:
    for part in path.split("."):
        node = node.get("properties", {}).get(part, {})
    return bool(node)


def test_former_names_lead_to_settings_that_exist_and_are_none_themselves() -> None:
    expert, defs = read_schema("expert"), read_schema("expert")["$defs"]
    places = [
        defs["training"],
        defs["source"],
        *(expert["properties"][name] for name in ("data", "evaluation")),
        expert,
    ]
    for old, new in FORMER_NAMES.items():
        holders = [place for place in places if below(place, new)]
        assert holders, new
        assert not any(old in place["properties"] for place in holders), old
