"""Settings of other trainers become manifests for this workflow."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import PATIENCE_S, ROOT, SHARED_DATA, run_script

from expertflow.config.load import load_config, load_expert
from expertflow.config.other_trainers import Translation, translate, write_manifest
from expertflow.core.errors import ConfigError
from expertflow.data.shapes import compile_template
from expertflow.data.sources.hub_rows import RowRange, parse_split
from expertflow.plan.settings import Training
from expertflow.plan.switches import choose_warmup

SHARED = SHARED_DATA.parent
PUBLIC = sorted(SHARED.glob("configs/*/*.y*ml"))
OWNERS = sorted(SHARED.glob("owners/A/*/manifest.json"))
CONFIG = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
QLORA = """
base_model: C:\\models\\llama
load_in_4bit: true
adapter: qlora
datasets:
  - {path: mlabonne/FineTome-100k, type: chat_template, field_messages: conversations,
    split: "train[:20%]", revision: abc, roles_to_train: [user], train_on_eos: last}
  - {path: a/b, type: alpaca, _comment: good}
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_8bit
lora_r: 32
lora_target_linear: true
learning_rate: 2e-4
warmup_steps: 10
max_steps: -1
val_set_size: 0.05
wandb_project: mine
wandb_name:
noise: 3
"""


def test_a_recipe_is_translated_and_what_is_left_out_is_explained(tmp_path: Path) -> None:
    path, output = tmp_path / "qlora.yml", tmp_path / "config" / "experts" / "mine.yaml"
    path.write_text(QLORA)
    done = run_script("import_settings", path, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "16 keys mapped, 1 left out with a reason, 1 unknown" in done.stderr
    text = output.read_text()
    for line in (
        "# optimizer: paged_adamw_8bit is adamw_8bit here.",
        "# A step has 8 packed rows per card, as before. With packing bfd, a row has",
        "# Left out of data set mlabonne/FineTome-100k: roles_to_train, train_on_eos.",
        "# a/b: instead of Alpaca's headings, the chat template is used.",
        "# train[:20%] of FineTome-100k: everything is read; max_documents limits it.",
        "#   wandb_project: wandb reads WANDB_PROJECT and the like from the environment",
        "# Left out:",
        "# Unknown here, and left out: noise",
    ):
        assert line in text.splitlines()
    expert = load_expert("mine", folders=[output.parent], config=load_config(CONFIG))
    training, source = expert["training"], expert["sources"][0]
    assert (training["lora"]["targets"], training["learning_rate"]) == (["all-linear"], 2e-4)
    assert (source["revision"], source["messages"]) == ("abc", "conversations")
    assert expert["model"] == "/mnt/c/models/llama"
    # Later edits are not lost.
    again = run_script("import_settings", path, "--output", output)
    assert again.returncode == 1 and "already exists" in again.stderr
    assert run_script("import_settings", path).stdout == text
    assert list(yaml.safe_load(text))[:2] == ["description", "model"]
    unpacked = translate_text(tmp_path, QLORA.replace("sample_packing: true", ""))
    assert any("A step has 8 examples per card, as before" in note for note in unpacked.notes)
    missing = run_script("import_settings", "qlora.yml", cwd=tmp_path / "config").stderr
    assert missing.endswith("cannot be read (No such file or directory); correct the path\n")


def test_an_unsupported_recipe_gets_a_line(tmp_path: Path) -> None:
    for text, problem in {
        "finetuning_type: oft": "method oft is not supported",
        "use_galore: true": "use_galore asks for GaLore",
        "learning_rate: 1": "names no model; add one of model_name_or_path",
        "- 1": "contains no settings",
        "stage: dpo": "training by dpo is not supported",
        "rl: kto": "training by kto is not supported",
        "datasets: 5": r"x\.yaml: key 'datasets' is 5: it must be of type string or array",
        "datasets: [3]": "'datasets.0' is 3: it must be",
        "dataset: {datasets: [{type: 5}]}": r"'dataset\.datasets\.0\.type' is 5",
        "base_model: [m]": r"'base_model' is \['m'\]: it must be of type string",
        "base_models: [m]": "names no model",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            translate_text(tmp_path, text)
    for text, problem in {
        "accelerate launch trl dpo --model_name m": "training by dpo is not supported",
        "trl sft --model_name 'm": "x.sh: cannot be read as a command line",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            translate_text(tmp_path, text, "x.sh")


def translate_text(folder: Path, text: str, name: str = "x.yaml") -> Translation:
    (folder / name).write_text(text)
    return translate(folder / name)


def training_of(folder: Path, text: str) -> dict[str, Any]:
    training: dict[str, Any] = translate_text(folder, text).manifest["training"]
    return training


# Files of several trainers and earlier systems, and the manifests that mean the same.
RECIPES = yaml.safe_load(r"""
- file: llama-factory.yaml
  text: |
    {model_name_or_path: m, stage: pt, finetuning_type: lora, quantization_bit: 4, lora_rank: 64,
     lora_target: "q_proj,v_proj", additional_target: "embed_tokens,lm_head", dataset: "web, books",
     dataset_dir: /lf, max_samples: 9, train_on_prompt: true, cutoff_len: 512,
     per_device_train_batch_size: 2}
  data: {supervise: all}
  training:
    method: qlora
    packing: concat
    max_seq_length: 512
    batch_size: 2
    gradient_accumulation_steps: 1
    lora:
      {r: 64, alpha: 128, dropout: 0.0, targets: [q_proj, v_proj],
       modules_to_save: [embed_tokens, lm_head]}
  sources:
  - {name: web, kind: local, path: /lf/web.json, text: "{text}", max_documents: 9}
  - {name: books, kind: local, path: /lf/books.json, text: "{text}", max_documents: 9}
- file: llama-factory-1.yaml
  text: |
    {model: m, peft_config: {name: lora, lora_alpha: 32}, train_dataset: d/x.yaml,
     quant_config: {name: bnb, quantization_bit: 4}}
  training: {method: qlora, packing: none, lora: {alpha: 32}}
  sources: [{name: x, kind: local, path: d/x.jsonl, messages: messages}]
- file: axolotl.yaml
  text: |
    base_model: m
    datasets:
    - {path: a/b, name: c, type: sharegpt, message_property_mappings: {role: who, content: says}}
    - {path: d.json, ds_type: json, message_field_role: who, message_field_content: says}
    - {path: e/f, type: completion, field: body}
  training: {method: full, packing: none}
  sources:
  - {name: b, kind: hub, id: a/b, config: c, messages: conversations, role_key: who,
     content_key: says}
  - {name: d, kind: local, path: d.json, messages: messages, role_key: who, content_key: says}
  - {name: f, kind: hub, id: e/f, text: "{body}"}
- file: trl.args
  text: |
    # trl sft
    trl sft --model_name m --use_peft --chat_template '{% for x in y %}' --eos_token @ stray \
      --lora_target_modules q_proj k_proj v_proj --bf16 --report_to wandb --dataset_name a/b \
      --dataset_config=c --dataset_train_split train_sft --dataset_text_field body
  training:
    {method: lora, packing: none, bf16: true, report_to: wandb,
     lora: {targets: [q_proj, k_proj, v_proj]}}
  sources: [{name: b, kind: hub, id: a/b, config: c, split: train_sft, text: "{body}"}]
- file: trl.yml
  text: |
    {model_name_or_path: m, fsdp: full_shard, dataset_mixture: {datasets: [
      {id: a/b, config: c, split: train, weight: 0.5}, {id: d/e, split: x}]}}
  training: {method: full, packing: none, parallel: fsdp}
  sources:
  - {name: b, kind: hub, id: a/b, config: c, weight: 0.5, messages: messages}
  - {name: e, kind: hub, id: d/e, split: x, messages: messages}
- file: swift.sh
  text: |
    swift sft --model m --model_name robot --dataset 'a/b#500' d/e.jsonl --learning_rate 1e-4
  training: {method: lora, packing: none, learning_rate: 1.0e-4}
  sources:
  - {name: b, kind: hub, id: a/b, messages: messages, max_documents: 500}
  - {name: e, kind: local, path: d/e.jsonl, messages: messages}
- file: unsloth.txt
  text: |
    unsloth-cli.py --model_name m --load_in_4bit --r 64 --use_rslora --warmup_steps 5 \
      --use_gradient_checkpointing unsloth --max_steps 400 --data_path d/e.csv.zst
  training:
    {method: qlora, packing: none, gradient_checkpointing: true, max_steps: 400,
     warmup_steps_min: 5, warmup_steps_max: 5, override_min_warmup: false,
     lora: {r: 64, use_rslora: true}}
  sources: [{name: e-csv, kind: local, path: d/e.csv.zst, messages: messages}]
- file: mlx.yaml
  text: |
    {model: m, fine_tune_type: dora, data: d, batch_size: 4, iters: 10, mask_prompt: false,
     lora_parameters: {rank: 8, dropout: 0.0}}
  data: {supervise: all}
  training:
    {method: lora, packing: none, batch_size: 4, gradient_accumulation_steps: 1, max_steps: 10,
     lora: {r: 8, dropout: 0.0, use_dora: true}}
  sources: [{name: train, kind: local, path: data/train.jsonl, messages: messages}]
- file: a.yaml
  text: |
    base_models: [{name: m}]
    training:
      dataset: {path: d/x.jsonl, field_mapping: {text: body}}
      config: {method: sft, adapter_type: dora, rank: 12, _comment: good}
  training: {method: lora, packing: none, lora: {r: 12, use_dora: true}}
  sources: [{name: x, kind: local, path: d/x.jsonl, text: "{body}"}]
- file: b.yaml
  text: |
    {model: {name: nickname, pretrained_model: m, use_4bit: true, use_lora: true, lora: {r: 8}},
     training: {base_learning_rate: 1.0e-4, warmup_steps_min: 10},
     epoch_calculation: {target_tokens: 9}, hardware_monitoring: {interval_seconds: 5},
     model_saving: {save_steps: 7}, logging: {report_to: [tensorboard]},
     optimization: {use_tf32: true}, quantization: {bf16: auto}, dataset_path: d/x.jsonl}
  training:
    {method: qlora, packing: none, lora: {r: 8}, learning_rate: 1.0e-4, warmup_steps_min: 10,
     target_tokens: 9, collection_interval_seconds: 5, save_steps: 7, report_to: tensorboard,
     use_tf32: true, bf16: true}
  sources: [{name: x, kind: local, path: d/x.jsonl, messages: messages}]
""")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["file"])
def test_a_complete_recipe_means_the_same_here(tmp_path: Path, recipe: dict[str, Any]) -> None:
    result = translate_text(tmp_path, recipe["text"], recipe["file"])
    given = {key: value for key, value in result.manifest.items() if key in recipe}
    assert given == {key: recipe[key] for key in recipe.keys() - {"file", "text"}}
    assert result.manifest["model"] == "m" and not result.unknown
    assert not any("Left out of data set" in note for note in result.notes)


def test_a_number_of_warm_up_steps_is_kept(tmp_path: Path) -> None:
    for text, n_steps in {
        "warmup_steps: 100": 100,
        "warmup_steps: 0": 0,
        # As in transformers, no steps leave a share in effect.
        "warmup_steps: 0\nwarmup_ratio: 0.25": 100,
        # A constant rate ignores any warm-up.
        "lr_scheduler_type: constant\nwarmup_steps: 9": 0,
        "lr_scheduler: constant": 0,
    }.items():
        training = training_of(tmp_path, f"model_name: m\n{text}")
        given = {key: value for key, value in training.items() if "warmup" in key}
        assert choose_warmup(Training(**given), 400)[0] == n_steps


def test_defaults_that_replace_others_are_named(tmp_path: Path) -> None:
    text = "learning_rate: 1e-5\nwarmup_steps: 0\nlora_r: 8"
    notes = translate_text(tmp_path, f"model_name: m\n{text}").notes
    names = "num_train_epochs, lr_scheduler_type, batch_size, max_seq_length"
    names += ", lora.alpha, lora.dropout, lora.targets, data.supervise"
    assert f"Not set there, so our defaults apply: {names}." in notes
    assert "lora_r implies an adapter; else set training.method to full." in notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A rank does not turn full fine-tuning into an adapter.
        ("stage: sft\nfinetuning_type: full\nlora_rank: 16", {"method": "full"}),
        ("lora_r: 8\nuse_peft: false", {"method": "full"}),
        ("lora_rank: 8\nlora_enabled: false", {"method": "full"}),
        ("adapter:\nlora_r: 8", {"method": "full"}),
        ("load_in_4bit: true", {"method": "qlora"}),
        ("adapter: qlora", {"method": "qlora"}),
        ("quantization_bit: 4\nlora_enabled: true", {"method": "qlora"}),
        ("method: dora", {"method": "lora", "lora": {"use_dora": True}}),
        # In any order.
        ("packing: false\npacking_strategy: bfd", {"packing": "none"}),
        ("packing_strategy: bfd\npacking: false", {"packing": "none"}),
        ("packing: true\npacking_strategy: wrapped", {"packing": "concat"}),
        ("packing_strategy: wrapped\npacking: true", {"packing": "concat"}),
        ("packing_strategy: bfd", {"packing": "none"}),
        ("packing_strategy: ffd\npacking: true", {"packing": "bfd"}),
        ("fp16: true", {"bf16": False, "packing": "none"}),
        ("neat_packing: true\npacking: false", {"packing": "bfd"}),
        ("packing: true\nneat_packing: false", {"packing": "bfd"}),
        # LitGPT's, torchtune's and mlx-lm's blocks.
        (
            "train: {micro_batch_size: 2, global_batch_size: 16, lr_warmup_steps: 5}\ndevices: 2",
            {"batch_size": 2, "gradient_accumulation_steps": 4, "warmup_steps_max": 5},
        ),
        ("optimizer: {lr: 1}\nlr_scheduler: {num_warmup_steps: 9}", {"learning_rate": 1.0}),
        ("lora_parameters: {scale: 10.0}", {"lora": {"r": 8, "alpha": 80}}),
    ],
)
def test_settings_that_depend_on_each_other_are_translated_together(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    assert expected.items() <= training_of(tmp_path, f"model_name: m\n{text}").items()


@pytest.mark.parametrize("turn", [1, -1])
def test_a_key_without_effect_sets_nothing(tmp_path: Path, turn: int) -> None:
    lines = ["completion_only_loss: true", "assistant_only_loss: false"][::turn]
    result = translate_text(tmp_path, "\n".join(["model_name: m", *lines]))
    assert result.manifest["data"]["supervise"] == "completion"
    assert not any("data.supervise" in note for note in result.notes)


def test_a_value_that_no_manifest_may_have_is_reported(tmp_path: Path) -> None:
    lines = (
        "save_steps: 0.1", "bf16: full", "quantization_bit: 8", "val_set_size: auto",
        "modules_to_save: [norm]", "additional_target: 7", "lora_target: 7",
        "target_modules: .*[qv]_proj$", "val_size: 1.0",
    )  # fmt: skip
    result = translate_text(tmp_path, "\n".join(["model_name: m", "warmup_steps: 0.1", *lines]))
    assert result.explained.keys() == {line.partition(":")[0] for line in lines}
    assert "embed_tokens, lm_head" in result.explained["modules_to_save"]
    why = ".*[qv]_proj$ is not supported; list the modules, without patterns"
    assert result.explained["target_modules"] == why
    assert result.manifest["training"]["warmup_ratio"] == 0.1


def sources_of(folder: Path, data_sets: str) -> list[dict[str, Any]]:
    text = f"base_model: m\ndatasets: [{data_sets}]"
    sources: list[dict[str, Any]] = translate_text(folder, text).manifest["sources"]
    return sources


def test_own_prompts_of_axolotl_are_filled_from_the_fields_they_name(tmp_path: Path) -> None:
    names = "field_instruction: ask, field_input: about, field_output: say, system_prompt: s"
    for form in ("{instruction} on {input}.", "{field_instruction} on {field_input}."):
        text = f"datasets: [{{path: a/b, type: {{{names}, format: '{form}'}}}}]"
        result = translate_text(tmp_path, f"base_model: m\n{text}")
        [source] = result.manifest["sources"]
        fill = compile_template(source["prompt"])
        assert fill({"ask": "x", "about": "y"}) == "x on y." and fill({"ask": "x"}) == "x on."
        assert source["completion"] == "{say}"
        assert "Left out of a data set's type: system_prompt." in result.notes
        assert any("remove marks such as [INST]" in note for note in result.notes)
    [source] = sources_of(tmp_path, "{path: a/b, type: {field_output: say}}")
    assert source == {
        "name": "b", "kind": "hub", "id": "a/b",
        "prompt": "{instruction}\n{input?}", "completion": "{say}",
    }  # fmt: skip


def test_data_files_are_read(tmp_path: Path) -> None:
    local = "{path: json, data_files: {train: [d/a.jsonl, d/b.jsonl], test: t.jsonl}, type: alpaca}"
    found = sources_of(tmp_path, f"{local}, {{path: csv, data_files: '*.csv', type: alpaca}}")
    assert [(one["name"], one["kind"], one["path"]) for one in found] == [
        ("a", "local", "d/a.jsonl"), ("b", "local", "d/b.jsonl"), ("data", "local", "*.csv"),
    ]  # fmt: skip
    [source] = sources_of(tmp_path, "{path: a/b, data_files: [x.jsonl], type: alpaca}")
    assert (source["id"], source["options"]) == ("a/b", {"data_files": ["x.jsonl"]})
    assert (source["prompt"], source["completion"]) == ("{instruction}\n{input?}", "{output}")
    [source] = sources_of(tmp_path, "{path: a/b, type: 'gpteacher:chat'}")
    assert (source["prompt"], source["completion"]) == ("{instruction}\n{input?}", "{response}")
    text = "model_name: m\ndatasets: [{path: a/b, type: input_output}]"
    note = "a/b: type input_output is unknown here; set the fields of its records."
    assert note in translate_text(tmp_path, text).notes
    text = "trl sft --model_name m --dataset_name json --data_files /d/x.jsonl"
    [source] = translate_text(tmp_path, text, "x.sh").manifest["sources"]
    assert (source["kind"], source["path"]) == ("local", "/d/x.jsonl")


def test_ranges_of_rows_are_read_where_the_hub_has_them(tmp_path: Path) -> None:
    sets = "{path: a/b, split: 'train[:9]'}, {path: a/b, split: 'x[1%:]'}, {path: d/a.jsonl,"
    result = translate_text(tmp_path, f"base_model: m\ndatasets: [{sets} split: 'train[0:9]'}}]")
    splits = [source.get("split") for source in result.manifest["sources"]]
    assert splits == ["train[:9]", "x", None]
    assert parse_split(str(splits[0])) == ("train", RowRange(0, 9))
    told = [note.partition(" ")[0] for note in result.notes if "everything is read" in note]
    assert told == ["x[1%:]", "train[0:9]"]


def test_splits_to_evaluate_on_are_not_trained_on(tmp_path: Path) -> None:
    mixer = "dataset_mixer: {a/b: 1.0, c/d: 0.5}\ndataset_splits: [train_sft, test_sft]"
    result = translate_text(tmp_path, f"model_name_or_path: m\n{mixer}")
    found = [(one["id"], one["split"], one.get("weight")) for one in result.manifest["sources"]]
    assert found == [("a/b", "train_sft", None), ("c/d", "train_sft", 0.5)]
    assert not result.unknown and any("test_sft of c/d is not read" in n for n in result.notes)
    mixture = "dataset_test_split: t\ndataset_mixture: {test_split_size: 9, datasets: [{id: a/b}]}"
    result = translate_text(tmp_path, f"model_name_or_path: m\n{mixture}")
    assert "Left out: test_split_size; data.eval_fraction holds documents out." in result.notes
    assert result.explained == {"dataset_test_split": "sources and data.eval_fraction"}
    both = sources_of(tmp_path, "{path: a/b, split: [train, validation]}, c/d")
    assert [one["id"] for one in both] == ["a/b", "c/d"] and "split" not in both[0]


def test_variables_have_the_values_of_their_script_or_a_reason(tmp_path: Path) -> None:
    text = "MODEL=a/b\ntrl sft --model_name $MODEL --output_dir ${OUT}/x --dataset_name $DATA"
    result = translate_text(tmp_path, text, "x.sh")
    assert result.manifest["model"] == "a/b" and not result.unknown
    assert result.explained["output_dir"] == "results go to results/{expert}/"
    assert result.explained["dataset_name"] == "$DATA is set elsewhere; write its value"
    assert [one["path"] for one in result.manifest["sources"]] == ["data/train.jsonl"]
    why = r"x\.yaml: names no model; \$\{MODEL\} is set elsewhere; write its value"
    with pytest.raises(ConfigError, match=why):
        translate_text(tmp_path, "base_model: ${MODEL}")


@pytest.fixture(scope="module")
def translated() -> dict[str, Translation | str]:
    """Translate real configurations; those that train something else yield a line instead."""
    if not PUBLIC:
        pytest.skip("no shared configurations")
    found: dict[str, Translation | str] = {}
    for path in [*PUBLIC, *OWNERS]:
        try:
            found[f"{path.parent.name}-{path.stem}"] = translate(path)
        except ConfigError as error:
            found[f"{path.parent.name}-{path.stem}"] = str(error)
    return found


def test_nine_of_ten_keys_of_real_recipes_are_known(
    translated: dict[str, Translation | str],
) -> None:
    taken = [one for one in translated.values() if isinstance(one, Translation)]
    refused = [one for one in translated.values() if isinstance(one, str)]
    assert len(taken) > 45 and len(refused) == 12
    n_keys = sum(len(one.keys) for one in taken)
    n_unknown = sum(len(one.unknown) for one in taken)
    print(f"{n_unknown} of {n_keys} keys unknown, of {len(taken)} files; {len(refused)} refused")
    assert n_unknown / n_keys <= 0.1
    assert all("is not supported; " in line and "\n" not in line for line in refused)


@pytest.mark.long
def test_every_translated_recipe_passes_a_dry_run(
    tmp_path: Path, translated: dict[str, Translation | str]
) -> None:
    folder = tmp_path / "config" / "experts"
    folder.mkdir(parents=True)
    record = {"instruction": "a", "input": "b", "output": "c", "text": "d", "messages": []}
    targets = []
    for number, one in enumerate(translated.values()):
        # The owners' base model is on their disk.
        if isinstance(one, str) or one.manifest["model"].startswith("/"):
            continue
        (folder / f"m{number}.yaml").write_text(write_manifest(one))
        targets.append(f"results/m{number}/report.json")
        for source in one.manifest["sources"]:
            if "path" in source:
                path = tmp_path / source["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(record if path.suffix == ".jsonl" else [record]))
    command = [str(Path(sys.executable).with_name("snakemake")), *targets, "-s", ROOT / "Snakefile"]
    # Trackers are separate packages, and no hub is contacted.
    command += ["--cores", "1", "-n", "--quiet", "rules", "--config", "training={report_to: none}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
