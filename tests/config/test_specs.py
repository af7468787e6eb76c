"""Specs of rules: each contains only what the rule uses; anything else reruns nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from manifests import base

from expertflow.config.expert import RunContext
from expertflow.config.workflow import Workflow
from expertflow.core.files import sha256_text
from expertflow.core.records import write_record
from expertflow.hardware import probe
from expertflow.rental.bundle.records import OPENED, BundleIndex, BundleSpec, OpenedBundle
from expertflow.tokens.records import TokenSpec

MODEL = "~/a model"
# From the command line.
TOLD = {"training": {"logging_steps": 7}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config/experts").mkdir(parents=True)
    return tmp_path


def specs_of(*rules: str, source: str = "s", **changes: Any) -> dict[str, Any]:
    """Return rules' specs of an expert with changes in its manifest."""
    Path("config/experts/e.yaml").write_text(yaml.safe_dump({**base(), **changes}))
    run = RunContext(config={"experts": {"e": {}}, "scratch": None}, told=TOLD)
    workflow = Workflow(run)
    wildcards = SimpleNamespace(expert="e", source=source)
    return {rule: json.loads(workflow.spec(rule)(wildcards)) for rule in rules}


def told(rule: str, bundle: BundleSpec | None = None, **changes: Any) -> Any:
    """Return a rule's spec of an expert, with ``bundle`` opened."""
    if bundle is not None:
        index = BundleIndex(format=2, kind="bundle", expert="e", code={}, members=(), spec=bundle)
        write_record(Path("results/e", OPENED), OpenedBundle(index=index, settings_here=None))
    return specs_of(rule, **changes)[rule]


def test_overrides_of_a_misspelled_expert_are_refused() -> None:
    Path("config/experts/mine.yaml").write_text("{}")

    def start(name: str | int) -> None:
        experts = {name: {"training": {"max_steps": 9}}}
        Workflow(RunContext(config={"experts": experts}, told={"experts": experts}))

    start("mine")
    with pytest.raises(SystemExit, match="no manifest for expert '1'"):
        start(1)
    with pytest.raises(SystemExit, match=r"no manifest for expert 'mien' .* did you mean 'mine'"):
        start("mien")
    # An opened bundle brings the manifest along.
    Path("results/mien", OPENED).parent.mkdir(parents=True)
    Path("results/mien", OPENED).write_text("{}")
    start("mien")


RULES = (
    "fetch_source", "find_datasets", "prepare_shard", "deduplicate_documents", "prepare_tokenizer",
    "prepare_model", "pretokenize_shard", "pack_sequences", "plan_training", "calibrate_expert",
    "stage_to_nvme", "check_references", "generate_answers", "evaluate_expert", "export_model",
    "build_report", "train_expert",
)  # fmt: skip
SOURCE = base()["sources"][0]
CHECK = {"field": "answer", "check": "length", "max_chars": 99}
SWEPT = {
    "learning_rate": 3e-6, "lr_scheduler_type": "linear", "warmup_ratio": 0.03, "save_steps": 9,
    "eval_steps": 9, "save_every_minutes": 1.0, "patience": 2, "load_best_model_at_end": True,
    "report_to": "tensorboard", "max_usd": 5.0, "max_hours": 1.0, "num_train_epochs": 7,
}  # fmt: skip
PASSED = {"path": "data.padding_fraction", "op": "<", "value": 0.5}


def leaves(value: Any) -> list[str]:
    """Return the settings within a block as in JSON."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [leaf for one in inner for leaf in leaves(one)] if inner else [json.dumps(value)]


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"sources": [{**SOURCE, "path": "y.jsonl"}]}, "fetch_source prepare_shard"),
        ({"sources": [{**SOURCE, "n_shards": 3}]}, "fetch_source"),
        ({"sources": [{**SOURCE, "text": "{t}"}]}, "prepare_shard"),
        ({"sources": [{**SOURCE, "category": "c"}]}, "prepare_shard"),
        ({"sources": [{**SOURCE, "checks": [CHECK]}]}, "prepare_shard"),
        ({"sources": [{**SOURCE, "weight": 0.5}]}, "deduplicate_documents"),
        ({"sources": [{**SOURCE, "max_documents": 5}]}, "deduplicate_documents"),
        ({"sources": [{**SOURCE, "license": "MIT"}]}, "find_datasets"),
        ({"data": {"near_duplicates": {"n_words": 7}}}, "prepare_shard deduplicate_documents"),
        ({"data": {"seed": 3}}, "deduplicate_documents"),
        ({"data": {"max_rejected_fraction": 0.3}}, "deduplicate_documents pack_sequences"),
        ({"data": {"system_prompt": "p"}}, "prepare_shard export_model"),
        ({"data": {"token_engine": "tokenizers"}}, "pretokenize_shard"),
        ({"data": {"text_special_tokens": "reject"}}, "prepare_tokenizer"),
        ({"builtin": {"vocab_size": 310}}, "prepare_tokenizer"),
        ({"builtin": {"hidden_size": 48}}, "prepare_model"),
        ({"model": "builtin:tiny-llama"}, "prepare_tokenizer prepare_model"),
        ({"model_revision": "r"}, "prepare_tokenizer prepare_model"),
        ({"model_license": "mit"}, "prepare_model"),
        ({"training": {"seed": 9}}, "prepare_model pack_sequences plan_training"),
        ({"training": {"packing": "concat"}}, "pack_sequences"),
        ({"training": {"overflow": "drop"}}, "pack_sequences"),
        # A sweep pays for one calibration.
        ({"training": SWEPT}, "plan_training"),
        ({"training": {"batch_size": 3}}, "plan_training calibrate_expert"),
        ({"training": {"optim": "adamw_8bit"}}, "plan_training calibrate_expert"),
        ({"training": {"max_grad_norm": 0.5}}, "plan_training calibrate_expert"),
        ({"description": "x"}, "export_model build_report"),
        ({"acceptance": [PASSED]}, "build_report"),
        (
            {"evaluation": {"task": "held_out_loss", "max_examples": 7}},
            "check_references generate_answers",
        ),
        ({"evaluation": {"task": "held_out_loss", "baselines": False}}, "evaluate_expert"),
    ],
)
def test_a_setting_reaches_the_rules_that_read_it(changes: dict[str, Any], rules: str) -> None:
    before, after = (specs_of(*RULES, **of) for of in ({}, changes))
    assert [rule for rule in RULES if after[rule] != before[rule]] == rules.split()
    for rule in rules.split():
        assert set(leaves(changes)) - set(leaves(base())) <= set(leaves(after[rule])), rule


def test_added_tokens_reach_tokenizer_model_and_card_and_must_be_trained() -> None:
    added: dict[str, Any] = {"data": {"added_tokens": ["<a>"]}}
    training = {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}}
    before, after = (specs_of(*RULES, training=training, **of) for of in ({}, added))
    changed = ["prepare_tokenizer", "prepare_model", "export_model"]
    assert [rule for rule in RULES if after[rule] != before[rule]] == changed
    assert [after[rule]["added_tokens"] for rule in changed] == [["<a>"]] * 3
    assert told("plan_training", training={"method": "full"}, **added)["method"] == "full"
    for tokens in (["<a>", "<a>"], [""], [" <a>"], ["<a>\n"]):
        with pytest.raises(SystemExit, match=r"e\.yaml.*data\.added_tokens.*(New|new) token"):
            told("prepare_model", training=training, data={"added_tokens": tokens})
    for named in ([], ["lm_head"]):
        with pytest.raises(SystemExit, match="added_tokens would stay untrained with an ada"):
            told("prepare_model", training={"lora": {"modules_to_save": named}}, **added)


def test_a_changed_adapter_to_continue_from_is_planned_and_trained_again(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32}
    training = {"lora": {"init_from": "adapter"}}
    Path("adapter").mkdir()
    with pytest.raises(SystemExit, match=r"adapter has no adapter_config\.json"):
        told("plan_training", training=training)
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    told_of = []
    for content in ("a", "b", "b"):
        Path("adapter/adapter_model.safetensors").write_text(content)
        told_of.append(told("plan_training", training=training))
    assert told_of[0] != told_of[1] == told_of[2]


def test_rules_get_only_their_settings_of_a_source() -> None:
    found = {"expert": "e", "preset": "full", "licenses": {"s": None}}
    assert told("find_datasets") == found
    generated = {"name": "g", "kind": "generated", "generator": "facts", "text": "{t}"}
    sources = [
        {"name": "h", "kind": "hub", "id": "a/b", "text": "{t}"},
        {**generated, "n_documents": 9, "seed": 2, "n_shards": 3},
    ]
    assert told("export_model", sources=sources)["hub_datasets"] == {"h": "a/b"}
    fetched = told("fetch_source", source="g", sources=sources)
    kept = {key: fetched["source"][key] for key in ("n_documents", "seed", "n_shards")}
    assert (fetched["preset"], kept) == ("full", {"n_documents": 9, "seed": 2, "n_shards": 3})
    # A shard does not depend on settings read before or after it.
    prepared = told("prepare_shard", source="g", sources=sources)["source"]
    assert [prepared[key] for key in ("seed", "n_documents", "n_shards")] == [None] * 3
    assert told("train_expert") == {"expert": "e"}
    assert told("ablate_expert")["n_repeats"] == 3


def test_a_bundle_gets_the_settings_behind_its_results() -> None:
    made = told("make_bundle", training={"learning_rate": 1e-5, "tuned": "t.json"})
    assert (made["expert"], made["tuned"], made["with_weights"]) == ("e", "t.json", False)
    assert set(made["code"]) == {*RULES, "generate_source"} - {"calibrate_expert"}
    assert all(len(code) == 16 for code in made["code"].values())
    assert made["config"]["preset"] == "full" and made["config"]["experts"] == {"e": {}}
    assert "scratch" not in made["config"] and made["config"]["calibrate"] is False
    assert (made["staging"], made["content"]) == ({"scratch": None, "weights": True}, {})
    assert told("stage_to_nvme") == made["staging"]
    assert made["tokens"] == told("pretokenize_shard")
    assert set(made["files"]) == {"experts/e.yaml", "hardware/gpus.yaml", "hardware/prices.yaml"}
    assert made["told"] == TOLD
    facts = {
        "name": "s",
        "kind": "generated",
        "generator": "facts",
        "n_documents": 9,
        "text": "{t}",
    }
    assert "generator facts" in told("make_bundle", sources=[facts])["code"]


def test_a_missing_benchmark_is_named() -> None:
    data = {"benchmarks": [{"path": "b.jsonl", "text": "{q}"}]}
    with pytest.raises(SystemExit, match=r"benchmarks names b\.jsonl, which does not exist"):
        told("prepare_shard", data=data)


def test_documents_do_not_depend_on_the_evaluation() -> None:
    def prepared(**data: Any) -> Any:
        return told("prepare_shard", data=data)

    one = prepared(near_duplicates={"threshold": 0.7}, max_rejected_fraction=0.1)
    assert one == prepared(near_duplicates={"threshold": 0.9}, max_rejected_fraction=0.2)
    assert one["near"] == {"n_words": 5, "n_permutations": 128}
    assert prepared()["near"] is None


@pytest.mark.parametrize("written", ["b.jsonl", "./b.jsonl", "data//b.jsonl"])
def test_a_benchmarks_content_counts_however_its_path_is_written(written: str) -> None:
    Path(written).parent.mkdir(exist_ok=True)
    Path(written).write_text("{}\n")
    made = told("prepare_shard", data={"benchmarks": [{"path": written, "text": "{q}"}]})
    assert made["benchmarks"][0]["sha256"] == sha256_text("{}\n")


@pytest.mark.parametrize(
    ("named", "place"), [("own.db", "own.db"), ("s:m.db", "results/e/sources/generated/s/m.db")]
)
def test_a_users_artifact_counts_by_its_content(named: str, place: str) -> None:
    """A generated one changes the record of its source."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text("some")
    sources = [{"name": "s", "kind": "local", "path": "x", "prompt": "{q}", "completion": "{a}"}]
    evaluation = {"task": "sql_execution", "artifacts": {"database": named}}
    made = told("generate_answers", evaluation=evaluation, sources=sources)
    content = {named: sha256_text("some")} if named == place else {}
    assert (made["artifacts"], made["content"]) == ({"database": place}, content)


def test_a_task_of_lm_eval_counts_by_its_content() -> None:
    Path("mine.yaml").write_text("task: mine")
    tasks = ["arc_easy", "mine.yaml"]
    evaluation = {"task": "held_out_loss", "lm_eval": {"tasks": tasks}}
    made = told("generate_answers", evaluation=evaluation)
    assert made["content"] == {"mine.yaml": sha256_text("task: mine")}


def test_categories_are_texts() -> None:
    def capped(cap: Any) -> tuple[Any, Any]:
        sources, data = [{**SOURCE, "category": "c"}], {"max_per_category": cap}
        made = told("deduplicate_documents", sources=sources, data=data)
        return made["max_per_category"], made["category_caps"]

    assert capped({0: 3, 1.5: 4, 2.0: 5, "x": 6}) == (None, {"0": 3, "1.5": 4, "2": 5, "x": 6})
    assert capped(7) == (7, {})


def made_by(**changes: Any) -> BundleSpec:
    config = {"preset": "demo", "experts": {"e": {}}}
    settings: dict[str, Any] = {
        "expert": "e", "config": config, "files": {}, "content": {}, "artifacts": {},
        "own_artifacts": {}, "tokens": TokenSpec(engine="auto", versions={"tokenizers": "0.1"}),
        "code": {}, "with_weights": False,
    }  # fmt: skip
    return BundleSpec(**{**settings, **changes})


def test_a_length_here_replaces_the_one_a_bundle_was_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"training": {"max_steps": 6, "lora": {"r": 8}}}
    made = made_by(told=there, config={"preset": "demo", "experts": {"e": {}}, **there})
    monkeypatch.setitem(TOLD, "training", {"num_train_epochs": 2, "method": "full"})
    spec = told("plan_training", made)
    assert (spec["num_train_epochs"], spec["max_steps"]) == (2, None)


def home(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    model = folder / "a model"
    model.mkdir(parents=True, exist_ok=True)
    for name, text in {"tokenizer": "t", "config": "c", **files}.items():
        (model / f"{name}.json").write_text(text)
    (model / "model.safetensors").write_text("weights")
    monkeypatch.setenv("HOME", str(folder))


def test_engines_that_did_not_tokenize_do_not_count() -> None:
    own = told("pretokenize_shard")
    assert own["versions"] != {"tokenizers": "0.1"}
    bundled = told("pretokenize_shard", made_by())
    assert bundled == {**own, "versions": {"tokenizers": "0.1"}}
    other = told("pretokenize_shard", made_by(), data={"token_engine": "tokenizers"})
    assert other["engine"] == "tokenizers"


def both(bundle: BundleSpec | None = None) -> tuple[Any, Any]:
    rules = ("prepare_tokenizer", "prepare_model")
    tokenizer, model = (told(rule, bundle, model=MODEL) for rule in rules)
    return tokenizer, model


def test_a_models_location_is_not_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home(tmp_path / "one", monkeypatch)
    one = both()
    assert [set(made["content"]) for made in one] == [
        {f"{MODEL}/tokenizer.json"}, {f"{MODEL}/config.json", f"{MODEL}/model.safetensors"},
    ]  # fmt: skip
    bundled = told("make_bundle", model=MODEL)["content"]
    assert bundled == {MODEL: one[0]["content"] | one[1]["content"]}
    home(tmp_path / "another", monkeypatch)
    (tmp_path / "another" / "a model" / "README.md").write_text("read by nobody")
    assert both() == one
    home(tmp_path / "another", monkeypatch, config="changed")
    tokenizer, model = both()
    assert tokenizer == one[0] and model != one[1]
    home(tmp_path / "another", monkeypatch, tokenizer="changed")
    tokenizer, model = both()
    assert tokenizer != one[0] and model == one[1]


def test_a_bundle_decides_about_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home(tmp_path, monkeypatch)
    made = both()
    bundle = made_by(content={MODEL: made[0]["content"] | made[1]["content"]})
    home(tmp_path, monkeypatch, config="changed", generation_config="new")
    assert both(bundle) == made
    home(tmp_path, monkeypatch, tokenizer="another")
    assert both(bundle)[0] != made[0]


@pytest.mark.parametrize("rule", ["train_expert", "calibrate_expert"])
def test_trainings_that_do_not_fit_end_the_run_before_any_job(rule: str) -> None:
    manifest = {**base(), "training": {"world_size": 2}}
    Path("config/experts/e.yaml").write_text(yaml.safe_dump(manifest))

    def refuse(rule: str, limit: int, *, main: bool = True) -> None:
        wildcards = SimpleNamespace(expert="e")
        run = RunContext(config={"experts": {"e": {}}}, main=main, gpu_limit=limit)
        workflow = Workflow(run)
        assert workflow.priority(rule, 3)(wildcards) == 3

    refuse(rule, 2)
    refuse("plan_training", 1)
    with pytest.raises(SystemExit, match="world_size is 2"):
        refuse(rule, 1)
    refuse(rule, 1, main=False)


def test_requirements_of_a_card_are_checked_before_any_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "lacks_cuda", lambda: False)
    monkeypatch.setattr(probe, "count_gpus", lambda: 1)
    monkeypatch.setattr(probe, "lacks_compiler", lambda: False)

    def check(rule: str, training: dict[str, Any], **run: Any) -> None:
        value = {**base(), "training": training}
        Path("config/experts/e.yaml").write_text(yaml.safe_dump(value))
        config = {"experts": {"e": {}}, "hardware": "H100 SXM"}
        workflow = Workflow(RunContext(config=config, gpu_limit=4, **run))
        workflow.priority(rule)(SimpleNamespace(expert="e"))

    few = "world_size is 2, one process per card, but this machine has 1 of 2; set it to 1"
    for rule in ("calibrate_expert", "train_expert"):
        with pytest.raises(SystemExit, match=few):
            check(rule, {"world_size": 2})
        check(rule, {"world_size": 2}, elsewhere=True)
        check(rule, {"world_size": 2, "n_nodes": 2})
    check("train_expert", {"world_size": 2}, looks=True)
    assert (
        "note: e: a run on this machine would be refused: training." + few
        in capsys.readouterr().err
    )
    check("ablate_variant", {"world_size": 2})
    # A driver that names no card: nobody knows.
    monkeypatch.setattr(probe, "count_gpus", lambda: None)
    check("train_expert", {"world_size": 2})

    monkeypatch.setattr(probe, "lacks_compiler", lambda: True)
    with pytest.raises(SystemExit, match=r"kernels cannot be built .* install gcc and python3-dev"):
        check("train_expert", {})
    for rule, training in (
        ("tune_expert", {}), ("train_expert", {"torch_compile": False}),
        ("train_expert", {"tuned": "results/e/tuning.json"}),
    ):  # fmt: skip
        check(rule, training)
    check("train_expert", {}, elsewhere=True)


def test_a_training_on_a_cpu_uses_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "usable_cpus", lambda: 12)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)

    def threads(hardware: str = "cpu", *, elsewhere: bool = False, **training: Any) -> int:
        value = {**base(), "training": training}
        Path("config/experts/e.yaml").write_text(yaml.safe_dump(value))
        config = {"experts": {"e": {}}, "hardware": hardware}
        workflow = Workflow(RunContext(config=config, elsewhere=elsewhere))
        return int(workflow.threads(SimpleNamespace(expert="e")))

    assert (threads(), threads(n_threads=5), threads(n_threads=1)) == (8, 5, 2)
    assert (threads("H100 SXM"), threads(world_size=2), threads(elsewhere=True)) == (2, 2, 2)
    monkeypatch.setattr(probe, "usable_cpus", lambda: 4)
    assert threads() == 4


def test_a_compiler_needs_python_headers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    assert probe.lacks_compiler()
    for content, lacks in (('grep -q "include <Python.h>"', False), ("exit 1", True)):
        (folder / "gcc").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{content}\n")
        (folder / "gcc").chmod(0o755)
        assert probe.lacks_compiler() is lacks
    monkeypatch.setenv("CC", "no-such-compiler")
    assert probe.lacks_compiler()
