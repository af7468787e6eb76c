"""Settings of a manifest and its overrides, cards and prices; a fault is one line with the fix."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import base, list_errors, load, source
from support import ROOT

from expertflow.config.contradictions import OF_MESSAGES, find_task_faults
from expertflow.config.hardware_tables import HardwareTables, calibration_spec
from expertflow.config.load import describe_origins, load_config, load_expert
from expertflow.config.machine import count_nodes
from expertflow.config.validate import former_names, read_schema
from expertflow.core.errors import ConfigError
from expertflow.plan.records import PlanSpec
from expertflow.plan.settings import TrainingSection


@pytest.mark.parametrize(
    ("config", "told", "message"),
    [
        ({"hardwear": "cpu"}, {"hardwear": "cpu"}, "--config: unknown key 'hardwear'"),
        (
            {"learning_rate": 1e-4},
            {"learning_rate": 1e-4},
            "--config: 'learning_rate' is a setting of training; write --config"
            " 'training={learning_rate: 0.0001}'",
        ),
        (
            {"evaluation": {"max_examples": 5}},
            {},
            "config/config.yaml: 'evaluation' is a key of an expert; write experts: {NAME: {eval",
        ),
        ({"calibrate": "maybe"}, {}, "config/config.yaml: key 'calibrate' is 'maybe'"),
        (
            {"ablation": {"n_repeats": 0, "files": ["x"]}},
            {"ablation": {"files": ["x"]}},
            "config/config.yaml: key 'ablation.n_repeats' is 0",
        ),
        (
            {"ablation": {"n_repeats": 0, "files": ["x"]}},
            {"ablation": {"n_repeats": "0"}},
            "--config: key 'ablation.n_repeats' is 0",
        ),
        ({"compare": [{"n_gpus": 2}]}, {"compare": [{"n_gpus": 2}]}, "--config: key 'compare.0.na"),
        ({"price_usd_per_hour": "1e999"}, {"price_usd_per_hour": "1e999"}, "--config: price_usd"),
    ],
)
def test_a_value_of_the_command_line_is_not_blamed_on_the_file(
    config: dict[str, Any], told: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"experts": {}, **config}, told)
    assert str(caught.value).startswith(message)


def test_two_manifests_of_one_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text("{}")
    refused(tmp_path, base(), "e.json next to it has the same name; remove one")


def refused(tmp_path: Path, value: dict[str, Any], message: str, **config: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, value, **config)
    line = str(caught.value)
    assert str(tmp_path / "e.yaml") in line and "\n" not in line


def test_later_settings_take_precedence_and_a_demo_block_is_not_an_override(tmp_path: Path) -> None:
    value = {**base(), "training": {"learning_rate": 1.0, "batch_size": 1, "seed": 1}}
    value["demo"] = {"training": {"learning_rate": 2.0, "batch_size": 2}}
    full = load(tmp_path, value, preset="full")["training"]
    demo = load(tmp_path, value)["training"]
    own = {"e": {"training": {"batch_size": 4}}}
    over = load(tmp_path, value, training={"learning_rate": 3.0}, experts=own)["training"]
    assert (full["learning_rate"], full["batch_size"]) == (1.0, 1)
    assert (demo["learning_rate"], demo["batch_size"], demo["seed"]) == (2.0, 2, 1)
    assert (over["learning_rate"], over["batch_size"]) == (3.0, 4)
    # The command line wins over both, and a length over one of another kind.
    value["demo"]["training"] |= {"target_tokens": 9, "min_epochs": 2, "num_train_epochs": 7}
    told = {"training": {"batch_size": "8", "max_steps": "6"}}
    over = load(tmp_path, value, training={"max_steps": 6}, experts=own, told=told)["training"]
    assert (over["batch_size"], over["max_steps"], over["num_train_epochs"]) == (8, 6, 7)
    epochs = {"training": {"num_train_epochs": "2"}}
    over = load(tmp_path, value, experts=own, told={**told, "experts": {"e": epochs}})["training"]
    assert (over["num_train_epochs"], over["max_steps"], over["target_tokens"]) == (2, None, None)
    demo = {"e": {"demo": {}}}
    with pytest.raises(ConfigError, match=r"experts\.e\.demo has no effect"):
        load(tmp_path, base(), experts=demo)


def test_the_last_source_of_a_setting_is_its_origin(tmp_path: Path) -> None:
    training = {"learning_rate": 1e-3, "seed": 3, "save_steps": 7}
    value = {**base(), "training": training, "demo": {"training": {"seed": 4}}}

    def origins(**config: Any) -> dict[str, str]:
        found: dict[str, str] = load(tmp_path, value, **config)["setting_origins"]
        return found

    own = {"learning_rate": "manifest", "save_steps": "manifest"}
    assert origins() == {**own, "seed": "overlay"}
    assert origins(told={"experts": {"e": "null"}}) == origins()
    assert origins(preset="full") == {**own, "seed": "manifest"}
    made = origins(training={"learning_rate": 1e-2, "seed": 5}, told={"training": {"seed": 5}})
    assert (made["learning_rate"], made["seed"]) == ("overlay", "command line")
    mine = {"e": {"training": {"save_steps": 9}}}
    assert origins(experts=mine, told={"experts": mine})["save_steps"] == "command line"


def test_a_manifest_states_where_its_values_come_from(tmp_path: Path) -> None:
    public = {"from": "public", "why": "the recipe's own"}
    origins = {"training.learning_rate": public, "sources.s.text": {"from": "own"}}
    origins |= {"demo.training.seed": {"from": "own"}}
    settings = {"training": {"learning_rate": 1e-3}, "demo": {"training": {"seed": 1}}}
    load(tmp_path, {**base(), **settings, "origins": origins})
    text = describe_origins(tmp_path / "e.yaml")
    assert "training.learning_rate 0.001: from a public recipe; the recipe's own" in text
    assert "sources.s.text {body}: chosen here" in text


def test_all_linear_is_a_string_or_a_list(tmp_path: Path) -> None:
    def targets(value: Any) -> Any:
        lora = {"targets": value}
        return load(tmp_path, {**base(), "training": {"lora": lora}})["training"]["lora"]["targets"]

    assert targets("all-linear") == targets(["all-linear"]) == ["all-linear"]
    message = "'training.lora.targets' is 'q_proj': it must be exactly one of: array; 'all-linear'"
    with pytest.raises(ConfigError, match=message):
        targets("q_proj")


def test_strings_of_the_command_line_are_converted_by_the_schema(tmp_path: Path) -> None:
    # Snakemake reads ``--config 'training={max_steps: 30}'`` as an object of strings.
    training = {"max_steps": "30", "learning_rate": "3e-6", "max_usd": "2.5", "bf16": "true"}
    told = load_config({"experts": {"e": "null"}, "training": {**training, "eval_steps": "null"}})
    assert told["training"] == {
        "max_steps": 30, "learning_rate": 3e-6, "max_usd": 2.5, "bf16": True, "eval_steps": None
    }  # fmt: skip
    assert told["experts"] == {"e": None}
    # Settings that take only strings keep them: a revision or a name may look like anything.
    own = {
        "model": "1.5e3",
        "model_revision": "1.0",
        "description": "true",
        "data": {"added_tokens": ["7", "null"], "eval_fraction": "0.5", "max_documents": "1e3"},
        "decoding": {"stop": ["0"], "temperature": "1"},
        "sources": {"s": {"revision": "1234e56", "weight": "2", "where": {"year": "1999"}}},
        "acceptance": [{"path": "a", "op": "<", "value": "1.5"}],
    }
    found = load_config({"experts": {"e": own}})["experts"]["e"]
    data = {"added_tokens": ["7", "null"], "eval_fraction": 0.5, "max_documents": 1000}
    source = {"revision": "1234e56", "weight": 2, "where": {"year": "1999"}}
    bar = {"path": "a", "op": "<", "value": 1.5}
    changed = {"data": data, "sources": {"s": source}, "acceptance": [bar]}
    assert found == {**own, "decoding": {"stop": ["0"], "temperature": 1}, **changed}


SOURCE = {"name": "s", "kind": "local", "path": "x.jsonl"}
BENCHMARK = {"path": __file__, "text": "{q"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"learning_rate": 0}}, "'training.learning_rate' is 0: it must be above 0"),
        ({"data": {"eval_fraction": 0}}, "'data.eval_fraction' is 0: it must be above 0"),
        ({"sources": []}, "'sources' is .*it needs at least 1 item"),
        ({"sources": [{"name": "s", "kind": "hub", "text": "{a}"}]}, "id' is missing; add it"),
        ({"sources": [{"name": "s", "kind": "local", "path": "x"}]}, "with prompt and completion"),
        ({"training": {"warmup_steps_min": 9, "warmup_steps_max": 3}}, "above warmup_steps_max 3"),
        ({"training": {"max_steps": 1, "target_tokens": 1}}, "are both set; drop one"),
        ({"training": {"min_epochs": 1}}, "min_epochs bounds target_tokens, which is not set"),
        (
            {"training": {"target_tokens": 9, "min_epochs": 3, "max_epochs": 2}},
            "min_epochs 3 is above max_epochs 2",
        ),
        ({"training": {"method": "full", "lora": {"init_from": "a"}}}, "init_from needs an adapt"),
        ({"training": {"use_sdpa": False, "attention": "flex"}}, "use_sdpa is false and attention"),
        ({"training": {"parallel": "fsdp", "optim": "adamw_8bit"}}, "states of optim adamw_8bit"),
        ({"evaluation": {"task": "exact_match", "seed": -1}}, "'evaluation.seed' is -1"),
        ({"training": {"lora_alpha": 8}}, "'training.lora_alpha'; it is called 'lora.alpha' here"),
        ({"training": {"load_in_4bit": True}}, "load_in_4bit'; training.method: qlora; remove it"),
        # An old name counts only where the new one belongs.
        ({"decoding": {"lora_r": 4}}, "'decoding.lora_r'; known keys: stop"),
        ({"sources": [{**SOURCE, "prompt": "{q}"}]}, "'sources.0' has kind, name, path, prompt: "),
        ({"data": {"benchmarks": [BENCHMARK]}}, ": benchmark .*test_load.py: template '{q'"),
        ({"data": {"near_duplicates": {"n_words": 1 << 17}}}, "it must be at most 10000"),
        ({"data": {"chat_template": "{{ x }}" * 99}}, "a template itself; save it to a file"),
        ({"demo": {"modle": "x"}}, "unknown key 'modle'"),
        ({"ablation": {}}, "'ablation'; it is a key of config/config.yaml; move it there"),
        ({"eval_fraction": 0.1}, "'eval_fraction'; it is a key of data; move it there"),
        ({"training": {"r": 8}}, "'training.r'; it is a key of training.lora; move it there"),
        ({"data": {"model": "x"}}, "'data.model'; it is a key of the manifest itself or eval"),
        (
            {"sources": [{**SOURCE, "text": "{a}", "near_duplicates": {}}]},
            "'sources.0.near_dup.* of data;",
        ),
        # YAML reads the key 1 as a number and the key on as true.
        ({"data": {1: "x", "seeed": 0}}, "unknown key 'data.1'; known keys:"),
        ({"sources": [{**base()["sources"][0], "where": {1: "x"}}]}, "where' is 1: .*Quote a key"),
        ({"origins": {"evaluation.tsk": {"from": "own"}}}, "did you mean 'evaluation.task'"),
        ({"origins": {"evaluation.task": {"from": "nobody"}}}, "'nobody': it must be one of"),
        ({"origins": {"evaluation.task": {"why": "x"}}}, "from' is missing"),
        ({"evaluation": {"task": "exactmatch"}}, "'evaluation.task' is 'exactmatch'"),
        ({"sources": [{**base()["sources"][0], "kind": "locl"}]}, "'sources.0.kind' is 'locl'"),
        ({"claims": [{"text": "t", "duration": 2807}]}, "is 2807: .*put it in quotes .*46:47"),
    ],
)
def test_a_fault_names_its_fix(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    refused(tmp_path, {**base(), **change}, message)


SQL = {"field": "a", "check": "sql", "dialect": "sqlit"}
IDLE = [
    ({"prompt": "{q}"}, "prompt has no effect with text; remove one"),
    ({"messages": "m", "completion": "{q}"}, "completion has no effect with messages"),
    *(({key: "x"}, f"{key} has no effect without messages") for key in OF_MESSAGES[:-1]),
    ({"roles": {"x": "user"}}, "roles has no effect without messages"),
    ({"kind": "hub", "path": "x"}, "path applies only to git and local sources, not to hub"),
    *(
        ({"kind": "git", key: "x"}, f"{key} applies only to hub sources, not to git; remove it")
        for key in ("id", "revision", "config", "split")
    ),
    *(
        ({key: value}, f"{key} applies only to generated sources, not to local")
        for key, value in (("generator", "facts"), ("n_documents", 9), ("seed", 0))
    ),
    ({"kind": "hub", "options": {"data_file": "x"}}, "options.data_file: unknown; use"),
    ({"kind": "generated", "options": {"ref": "x"}}, "this kind of source has no options"),
    ({"text": "{q!r}"}, "text: template '{q!r}': !r has no effect; write {q}"),
    ({"text": "{q:xml}"}, "text: template '{q:xml}': no format 'xml'"),
    ({"text": "the body"}, "text: template 'the body': it names no field"),
    ({"text": "{{body}}"}, "text: template '{{body}}': it names no field; write {body}"),
    ({"checks": [SQL]}, "check sql of 'a': dialect 'sqlit'"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), IDLE)
def test_a_key_without_effect_is_rejected(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    refused(tmp_path, {**base(), "sources": [source(**keys)]}, f"source src.*{message}")


def test_an_idle_setting_of_the_command_line_is_rejected(tmp_path: Path) -> None:
    idle = {
        "lora": {"r": 8}, "lr_decay_ratio": 0.5, "torch_compile_mode": "reduce-overhead",
        "overflow": "drop", "parallel": "fsdp", "warmup_ratio": 0.3, "dataloader_num_workers": 4,
    }  # fmt: skip
    steps = {"warmup_steps_min": 3, "warmup_steps_max": 3, "override_min_warmup": False}
    training = {"method": "full", "torch_compile": False, "packing": "concat", **steps}
    value = {**base(), "training": training}
    lines = list_errors(tmp_path, value, told={"experts": {"e": {"training": idle}}})
    assert re.findall(r"training\.(\w+) has no effect", " ".join(lines)) == [*idle]
    # A manifest may have them for another preset.
    assert load(tmp_path, {**value, "training": training | idle})


def test_keys_with_an_effect_or_null_are_accepted(tmp_path: Path) -> None:
    idle = source(revision=None, roles={}, options={}, category="c")
    chat = source(messages="m", tools="t", roles={"x": "user"}) | {"name": "chat"}
    # One question, many answers.
    poems = {"name": "poems", "kind": "local", "path": "x", "completion": "{poem}"}
    data, sources = {"max_per_category": 5}, [idle, chat, {**poems, "prompt": "Write a poem."}]
    assert load(tmp_path, {**base(), "sources": sources, "data": data})
    refused(tmp_path, {**base(), "sources": [{**poems, "prompt": "q"}]}, "no field; write {q}")


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


def below(node: dict[str, Any], path: str) -> bool:
    for part in path.split("."):
        node = node.get("properties", {}).get(part, {})
    return bool(node)


def test_former_names_lead_to_existing_settings_and_are_not_settings() -> None:
    expert, defs = read_schema("expert"), read_schema("expert")["$defs"]
    places = [defs["training"], defs["source"], expert]
    places += [expert["properties"][name] for name in ("data", "evaluation")]
    for old, new in former_names().items():
        holders = [place for place in places if below(place, new)]
        assert holders, new
        assert not any(old in place["properties"] for place in holders), old


@pytest.mark.parametrize(
    ("task", "fields", "artifacts", "message"),
    [
        ("sql_execution", {}, {}, r"reads evaluation\.artifacts\.database"),
        ("sql_execution", {"database": "which"}, {}, r"reads evaluation\.artifacts\.database"),
        ("sql_execution", {}, {"databse": "x"}, r"artifacts\.databse .*did you mean 'database'\?"),
        ("json_schema", {}, {}, r"reads evaluation\.fields\.schema"),
        ("typescript_tests", {"prefix": "p"}, {}, r"reads evaluation\.fields\.tests"),
        ("multiple_choice", {"choices": "c"}, {}, r"reads evaluation\.fields\.answer"),
        ("multiple_choice", {"answer": "c"}, {}, r"reads evaluation\.fields\.choices"),
        ("cypher", {"shema": "s"}, {}, r"fields\.shema .*did you mean 'schema'\?"),
        ("exact_match", {"schema": "s"}, {}, r"fields\.schema .*takes none"),
        ("held_out_loss", {"pattern": "s"}, {}, r"fields\.pattern has no effect"),
    ],
)
def test_a_task_with_missing_or_unused_inputs_is_rejected(
    task: str, fields: Any, artifacts: Any, message: str
) -> None:
    [fault] = find_task_faults({"task": task, "fields": fields, "artifacts": artifacts})
    assert re.search(message, fault)


def test_a_task_may_have_inputs_of_another_one() -> None:
    for task, fields, artifacts in (
        ("held_out_loss", {"schema": "s"}, {"database": "x"}),
        ("exact_match", {}, {"database": "x"}),
        ("sql_execution", {"database": "which"}, {"one": "x", "two": "y"}),
        ("multiple_choice", {"choices": "c", "answer": "a"}, {}),
    ):
        assert not [*find_task_faults({"task": task, "fields": fields, "artifacts": artifacts})]


@pytest.mark.parametrize("name", ["<b>x", "a\x1b[31m", "a\u202eb", ".tokens", ""])
def test_an_experts_name_is_printable_everywhere(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'experts' is .*: it must match .* letters, digits"):
        load_config({"experts": {name: {}}})
    assert load_config({"experts": {"Überweisung 2.1": {}}})


def test_sources_are_changed_by_name(tmp_path: Path) -> None:
    manifest = {**base(), "sources": [{**base()["sources"][0], "name": "mine"}]}

    def changed(sources: dict[str, Any]) -> dict[str, Any]:
        [source] = load(tmp_path, manifest, experts={"e": {"sources": sources}})["sources"]
        return dict(source)

    # As from Snakemake's --config: numbers inside an object are strings.
    source = changed({"mine": {"path": "007", "max_documents": "100"}})
    assert (source["path"], source["max_documents"], source["text"]) == ("007", 100, "{body}")
    with pytest.raises(ConfigError, match=r"sources\.min: the expert has no such .* mean 'mine'"):
        changed({"min": {"path": "b"}})
    told = {"e": {"sources": {"mine": "b", "min": {"path": "b"}}}}
    first, second = list_errors(tmp_path, manifest, experts=told)
    assert "sources.mine is 'b'; set keys" in first and "sources.min: the expert" in second


def test_one_machine_requests_no_nodes_and_several_as_many() -> None:
    assert count_nodes(TrainingSection(world_size=4, n_nodes=1)) is None
    assert count_nodes(TrainingSection(world_size=4, n_nodes=2)) == 2
    said = r"n_nodes is 2 and training\.world_size 3, .* a multiple of 2"
    with pytest.raises(ConfigError, match=said):
        count_nodes(TrainingSection(world_size=3, n_nodes=2))


PRICE = {"usd_per_hour": 2.5, "as_of": "2026-11-01"}
COMPARE = [{"name": "L40S", "n_gpus": 2}]


def tables(folder: Path, prices: Any = None, **config: Any) -> HardwareTables:
    (folder / "hardware").mkdir(exist_ok=True)
    if prices is not None:
        (folder / "hardware" / "prices.yaml").write_text(yaml.safe_dump({"prices": prices}))
    settings = load_config({"experts": {"e": {}}, **config})
    return HardwareTables(settings, [folder, ROOT / "config"])


def spec(folder: Path, prices: Any = None, **config: Any) -> PlanSpec:
    return tables(folder, prices, **config).plan_spec(load(folder, base(), **config))


def test_a_spec_has_the_rows_and_prices_of_the_named_cards(tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    made = spec(tmp_path, hardware="H100 SXM", compare=shipped["compare"])
    assert (len(made.compare), made.prices) == (7, {})
    assert ("A100 40GB", 4) in {(choice.name, choice.n_gpus) for choice in made.compare}
    prices = {"H100 SXM": {**PRICE, "provider": "x", "billing_minutes": 1}, "B200": PRICE}
    made = spec(tmp_path, prices, hardware="H100 SXM", compare=COMPARE)
    assert [row["name"] for row in made.gpu_table] == ["L40S", "H100 SXM"]
    assert made.prices == {"H100 SXM": {**PRICE, "billing_minutes": 1}}
    assert [(choice.name, choice.n_gpus) for choice in made.compare] == [("L40S", 2)]
    # A card is also known by its driver's name, and nothing is compared with a CPU.
    named = spec(tmp_path, {"NVIDIA H100 80GB HBM3": PRICE}, hardware="H100 SXM")
    assert named.prices == {"H100 SXM": PRICE}
    example = yaml.safe_load((ROOT / "config" / "hardware" / "prices.example.yaml").read_text())
    copied = spec(tmp_path, example["prices"], hardware="H100 SXM", compare=shipped["compare"])
    assert copied.prices.keys() >= {"H100 SXM", "A100 80GB"}
    # Neither prices nor comparisons ask for another calibration.
    assert calibration_spec(copied) == calibration_spec(made)
    on_cpu = spec(tmp_path, prices, hardware="cpu", compare=COMPARE)
    assert (on_cpu.compare, on_cpu.gpu_table) == ((), ())


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ({"H100 SXM": {"usd_per_hour": 2.5}}, "as_of' is missing"),
        ({"H100 SXM": {**PRICE, "usd_per_hour": -1}}, "at least 0"),
        ({"H100 SXM": {**PRICE, "billing_minute": 1}}, "did you mean 'billing_minutes'"),
        ({"H100 SMX": PRICE}, r"prices names 'H100 SMX': .*did you mean 'H100 SXM'"),
        ({}, "compare names 'H900': no such row"),
    ],
)
def test_an_invalid_price_is_rejected(tmp_path: Path, prices: dict[str, Any], problem: str) -> None:
    unknown = [{"name": "H900", "n_gpus": 1}]
    with pytest.raises(ConfigError, match=problem):
        spec(tmp_path, prices, hardware="H100 SXM", compare=COMPARE if prices else unknown)


def test_only_a_demo_block_leads_to_the_cpu_and_drops_budgets(tmp_path: Path) -> None:
    manifest, on = {**base(), "demo": {"description": "small"}}, tables(tmp_path, hardware="L40S")
    for preset, value, hardware in (
        ("demo", manifest, "cpu"), ("full", manifest, "L40S"), ("demo", base(), "L40S"),
    ):  # fmt: skip
        made = on.plan_spec(load(tmp_path, value, preset=preset))
        assert (made.hardware, made.may_drop_budgets) == (hardware, hardware == "cpu")
