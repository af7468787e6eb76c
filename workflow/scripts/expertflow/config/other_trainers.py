"""Translate the settings of other trainers into a manifest, and explain what is left out."""

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jsonschema
import yaml
from msgspec import Struct

from expertflow.config.other_defaults import complete_training, explain_defaults, explain_rows
from expertflow.config.other_sources import list_sources
from expertflow.config.read_yaml import Settings, read_yaml
from expertflow.config.validate import check, read_table
from expertflow.core.errors import ConfigError
from expertflow.core.format import linux_path
from expertflow.core.settings import json_schema, list_settings, name_of
from expertflow.core.strict_json import iter_values
from expertflow.evaluate.records import HELD_OUT_LOSS
from expertflow.plan.settings import ALL_LINEAR, LoraSpec, Tracker, TrainingSection

# Sections that only group keys, in files that have them.
GROUPS = ("model.lora", "model", "training", "config", "epoch_calculation", "hardware_monitoring",
          "logging", "model_saving", "optimization", "quantization", "peft_config",
          "quant_config", "lora_parameters", "train", "optimizer.init_args", "optimizer",
          "lr_scheduler")  # fmt: skip
# Read by the handlers below, not by the table.
DATASETS = ("datasets", "dataset", "dataset_mixture", "dataset_mixer", "dataset_splits",
            "dataset_name", "train_dataset", "dataset_config", "dataset_train_split",
            "data_path", "dataset_path", "dataset_text_field", "train_path", "train_file",
            "field_mapping", "data_files", "dataset_dir")  # fmt: skip
# LitGPT's and torchtune's names of a number of steps.
WARMUPS = dict.fromkeys(("lr_warmup_steps", "num_warmup_steps"), "warmup_steps")
FOUR_BITS = ("load_in_4bit", "use_4bit", "quantization_bit")
# Keys that name the method, and switches for an adapter.
KINDS = ("adapter", "finetuning_type", "adapter_type", "fine_tune_type", "train_type", "tuner_type",
         "method", "peft_config.name")  # fmt: skip
SWITCHES = ("use_peft", "use_lora", "lora_enabled")
METHODS = (*KINDS, *SWITCHES, *FOUR_BITS, "quant_config.name")
ADAPTERS = ("lora", "qlora", "dora")
# Keys of a manifest besides the training settings.
SAME_NAME = {
    "model": "model", "model_revision": "model_revision", "chat_template": "data.chat_template",
}  # fmt: skip
TRAINING, LORA = "training", f"training.{name_of(TrainingSection.lora)}"
# Settings that take several words after one flag.
LISTS = (
    f"{LORA}.{name_of(LoraSpec.targets)}", f"{LORA}.{name_of(LoraSpec.modules_to_save)}",
    f"{TRAINING}.{name_of(TrainingSection.report_to)}",
)  # fmt: skip
# A command with its flags instead of a settings file.
FLAG_FILES = ("", ".sh", ".txt", ".args")
# $MODEL or ${MODEL}: a shell's or an environment's variable.
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


class Translation(NamedTuple):
    """A manifest, all keys of the file, reasons against some of them, and unknown ones."""

    manifest: Settings
    keys: list[str]
    explained: dict[str, str]
    unknown: list[str]
    notes: list[str]


def translate(path: Path) -> Translation:
    """Translate a file; ConfigError if it has no settings, or cannot be read or supported."""
    settings = read_flags(path) if path.suffix in FLAG_FILES else read_yaml(path)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: contains no settings; use a trainer's YAML or JSON file")
    found = _flatten(settings)
    check(found, read_table()["shapes"], where=str(path))
    _refuse_other_methods(found, path)
    result = Translation({}, [*found], {}, [], [])
    for key, value in found.items():
        texts = (one for one in iter_values(value) if isinstance(one, str) and " " not in one)
        if variable := next(filter(VARIABLE.search, texts), None):
            result.explained[key] = _reason(key) or f"{variable} is set elsewhere; write its value"
    found = {key: value for key, value in found.items() if key not in result.explained}
    manifest = result.manifest
    manifest["description"] = f"Translated from {path.name}."
    for key, value in found.items():
        if (why := _why_ignored(key, value, found)) is not None:
            result.explained[key] = why
        elif value is not None:
            _translate_key(key, value, result)
    if "model" not in manifest:
        names = [key for key, ours in read_table()["ours"].items() if ours == "model"]
        set_elsewhere = (result.explained[key] for key in names if key in result.explained)
        why = next(set_elsewhere, f"add one of {', '.join(names)}")
        raise ConfigError(f"{path}: names no model; {why}")
    manifest["model"] = linux_path(manifest["model"])
    _set(manifest, f"{TRAINING}.{name_of(TrainingSection.method)}", _method(found, result.notes))
    if "dora" in map(found.get, KINDS):
        _set(manifest, f"{LORA}.{name_of(LoraSpec.use_dora)}", True)
    if manifest[TRAINING][name_of(TrainingSection.method)] == "full":
        manifest[TRAINING].pop(name_of(TrainingSection.lora), None)
    complete_training(manifest[TRAINING], found)
    manifest["sources"] = list(list_sources(found, result.notes))
    manifest["evaluation"] = {"task": HELD_OUT_LOSS}
    result.notes.extend([*explain_defaults(manifest), *explain_rows(manifest[TRAINING])])
    return result


def read_flags(path: Path) -> Settings:
    """Read the flags of a command line, ``--key value`` or ``key=value``; skip other words."""
    try:
        text = path.read_text(encoding="utf-8")
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a command line ({error})") from error
    found: Settings = {}
    tool = next((word for word in words[:-1] if word in ("trl", "swift")), None)
    method = words[words.index(tool) + 1] if tool else "sft"
    if method.isalpha() and method != "sft":
        found["stage"] = method
    elif tool == "swift":
        # Its default.
        found["tuner_type"] = "lora"
    # MODEL=Qwen/Qwen3-0.6B above, and --model_name $MODEL below it.
    used = set(VARIABLE.findall(text))
    pairs = (word.split("=", 1) for word in words if "=" in word)
    own = {name: value for name, value in pairs if name in used}
    words = [VARIABLE.sub(lambda found: own.get(found[1], found[0]), word) for word in words]
    waiting: str | None = None
    for word in (word for word in words if word.partition("=")[0] not in own):
        name, has_value, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if word.startswith("--") or has_value:
            # As in a file: 3 is a number, true a boolean, [a, b] a list.
            found[key] = _flag_value(value) if has_value else True
            waiting = None if has_value else key
        # --key value: the flag had no value so far, and was taken as true.
        elif waiting is not None and found[waiting] is True:
            found[waiting] = _flag_value(word)
        elif waiting is not None and (_target(waiting) in LISTS or waiting == "dataset"):
            before = found[waiting]
            found[waiting] = [*(before if isinstance(before, list) else [before]), word]
    return found


def _flag_value(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        # A text with characters that YAML reserves, such as a chat template.
        return word


def write_manifest(result: Translation) -> str:
    """Return the manifest as YAML, below comments on what was left out and what changes."""
    lines = list(result.notes)
    if result.explained:
        lines.append("Left out:")
        lines += [f"  {key}: {why}" for key, why in result.explained.items()]
    if result.unknown:
        lines.append(f"Unknown here, and left out: {', '.join(result.unknown)}")
    head = "".join(f"# {line}\n" for line in lines)
    body: str = yaml.safe_dump(result.manifest, sort_keys=False, allow_unicode=True, width=100)
    return head + body


def _flatten(settings: Settings) -> Settings:
    """Return all keys with their values, nested ones by dotted names, without grouping sections."""
    match settings:
        # A's manifests describe an expert; only these parts are settings of its training.
        case {"base_models": [{"name": model}, *_], "training": {"config": dict(config), **others}}:
            settings = {"model": model, **config, "dataset": others.get("dataset")}
    section = settings.get("model")
    if isinstance(section, dict) and "name" in section:
        model = section.get("pretrained_model") or section["name"]
        rest = {k: v for k, v in section.items() if k not in ("name", "pretrained_model")}
        settings = {**settings, "model": {"model_path": model, **rest}}
    flat: Settings = {}

    def visit(value: Settings, prefix: str) -> None:
        for key, item in value.items():
            name = f"{prefix}{key}"
            if isinstance(item, dict) and name not in DATASETS:
                if name not in GROUPS:
                    flat[name] = item
                visit(item, f"{name}.")
            # A's manifests have comments: "_batch_comment".
            elif not str(key).startswith("_"):
                flat[name] = item

    visit(settings, "")
    # model.lora.rank -> rank; the longer prefix comes before the shorter in GROUPS.
    for group in GROUPS:
        flat = {
            key if key in METHODS else key.removeprefix(f"{group}."): value
            for key, value in flat.items()
        }
    flat = {WARMUPS.get(key, key): value for key, value in flat.items()}
    if isinstance(scale := flat.pop("scale", None), int | float):
        # mlx-lm's, by its own default rank.
        flat["lora_alpha"] = round(scale * flat.setdefault("rank", 8))
    return flat


def _refuse_other_methods(found: Settings, path: Path) -> None:
    for key, method in read_table()["unsupported"].items():
        if found.get(key):
            raise ConfigError(f"{path}: {key} asks for {method}, which is not supported; remove it")
    stage = found.get("rl") or found.get("stage") or "sft"
    if isinstance(stage, str) and stage not in ("sft", "pt"):
        raise ConfigError(
            f"{path}: training by {stage} is not supported; use supervised fine-tuning"
        )
    for kind in filter(None, map(found.get, KINDS)):
        if kind not in ("full", "sft", *ADAPTERS):
            raise ConfigError(f"{path}: method {kind} is not supported; use full, lora or qlora")


def _why_ignored(key: str, value: Any, found: Settings) -> str | None:
    """Return why a key is ignored in favor of another one for the same setting, else null."""
    packing = name_of(TrainingSection.packing)
    # ms-swift's model_name is what the model answers when asked.
    if key != "model" and "model" in found and _target(key) == "model":
        return "model names it"
    if key == "packing_strategy" and not found.get(packing):
        return "documents are not packed"
    if key == packing and value is True and found.get("packing_strategy"):
        return "packing_strategy says how"
    # In LLaMA-Factory it implies the other one.
    if key == packing and found.get("neat_packing"):
        return "neat_packing is true"
    if key == "neat_packing" and not value:
        return f"{packing} decides"
    if key == "quantization_bit" and value == 8:
        return _reason("load_in_8bit")
    losses = ("completion_only_loss", "assistant_only_loss")
    if key in losses and value is False and any(found.get(one) is True for one in losses):
        return "the other one is true"
    return None


def _translate_key(key: str, value: Any, result: Translation) -> None:
    if key in DATASETS or key in METHODS:
        return
    target = _target(key)
    if target is None:
        if (why := _reason(key)) is not None:
            result.explained[key] = why
        else:
            result.unknown.append(key)
        return
    if key == "warmup_steps" and isinstance(value, float) and value < 1:
        # transformers accepts a share of the steps there, too.
        target = f"{TRAINING}.{name_of(TrainingSection.warmup_ratio)}"
    try:
        given = _value(key, value, target)
        _check_value(given, target)
    except Unusable as error:
        result.explained[key] = str(error)
        return
    if given is None:
        return
    _set(result.manifest, target, given)
    if target.endswith(name_of(TrainingSection.warmup_steps_min)) and key == "warmup_steps":
        _set(result.manifest, f"{TRAINING}.{name_of(TrainingSection.warmup_steps_max)}", given)
        _set(result.manifest, f"{TRAINING}.{name_of(TrainingSection.override_min_warmup)}", False)
    if isinstance(value, str) and isinstance(given, str) and given != value:
        result.notes.append(f"{key}: {value} is {given} here.")


class Unusable(Exception):
    """A value without a counterpart; the message is the reason."""


def _target(key: str) -> str | None:
    if (target := SAME_NAME.get(key) or read_table()["ours"].get(key)) is not None:
        return str(target)
    for section, prefix in ((TrainingSection, TRAINING), (LoraSpec, LORA)):
        if key in {setting.name for setting in list_settings(section)}:
            return f"{prefix}.{key}"
    return None


def _reason(key: str) -> str | None:
    reasons: dict[str, str] = read_table()["why"]
    if key in reasons:
        return reasons[key]
    # hub_* stands for all keys with that prefix.
    begins = (name for name in reasons if name.endswith("*") and key.startswith(name[:-1]))
    return next((reasons[name] for name in begins), None)


def _value(key: str, value: Any, target: str) -> Any:
    """Return a value as it is written here, null for none; raise Unusable with the reason."""
    name = target.rpartition(".")[2]
    # -1 is how several trainers write "no limit", as max_steps does.
    if value in ("", -1) or (key == "warmup_steps" and not value):
        return None
    if value in ("offload", "unsloth"):
        return True
    if name == name_of(TrainingSection.report_to):
        first = value[0] if isinstance(value, list) and value else value
        return first if first in get_args(Tracker) else None
    if target == "data.chat_template" and value != "chatml":
        raise Unusable("auto uses the model's own; save another one to a file and set its path")
    if target == f"{LORA}.{name_of(LoraSpec.targets)}":
        names = _split_names(value)
        if value is True or names in (["all"], ["all-linear"]):
            return [ALL_LINEAR]
        if value and not (names and all(re.fullmatch(r"[\w.-]+", one) for one in names)):
            raise Unusable(f"{value} is not supported; list the modules, without patterns")
        return names or None
    if name == name_of(LoraSpec.modules_to_save):
        return _split_names(value) or value
    if name == name_of(TrainingSection.packing):
        # Other strategies split documents across rows, as concat does.
        return "bfd" if value in (True, "bfd", "ffd") else "none" if value is False else "concat"
    if name == name_of(TrainingSection.parallel):
        return "fsdp" if value else None
    if name == "supervise":
        return "all" if value is key.startswith("train_on_") else "completion"
    if name == "eval_fraction":
        if not isinstance(value, float) or not 0 < value < 1:
            raise Unusable("must be a share of the documents, above 0")
        return value
    return _text_value(value, target) if isinstance(value, str) else value


def _split_names(value: Any) -> list[str]:
    # "q_proj,v_proj", "q_proj v_proj" and a list of both are the same.
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    return text.replace(",", " ").split() if isinstance(text, str) else []


def _text_value(value: str, target: str) -> Any:
    if value == "auto":
        return True if target.endswith(name_of(TrainingSection.bf16)) else None
    renamed = read_table()["values"].get(target, {})
    if value in renamed:
        return renamed[value]
    with contextlib.suppress(ValueError):
        return float(value)
    return value


def _check_value(value: Any, target: str) -> None:
    """Raise Unusable for a value that no manifest may have."""
    section, _, name = target.rpartition(".")
    places: dict[str, type[Struct]] = {TRAINING: TrainingSection, LORA: LoraSpec}
    if section not in places or value is None:
        return
    schema = json_schema(places[section])["properties"][name]
    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        choices = ", ".join(map(str, schema.get("enum", ())))
        why = f"known: {choices}" if choices else schema["description"]
        raise Unusable(f"{value} is not supported; {why}")


def _set(manifest: Settings, target: str, value: Any) -> None:
    *above, last = target.split(".")
    for name in above:
        manifest = manifest.setdefault(name, {})
    manifest[last] = value


def _method(found: Settings, notes: list[str]) -> str:
    """Return what is trained: all weights, or an adapter on a base that may have 4 bits."""
    stated = [found[key] for key in (*KINDS, *SWITCHES) if key in found]
    four = any(found.get(key) in (True, 4) for key in FOUR_BITS)
    has_adapter = "full" not in stated and any(one in (True, *ADAPTERS) for one in stated)
    if not stated:
        set_keys = (key for key, value in found.items() if value)
        of_adapter = [key for key in set_keys if str(_target(key)).startswith(f"{LORA}.")]
        has_adapter = bool(of_adapter) or four
        if of_adapter:
            notes.append(f"{of_adapter[0]} implies an adapter; else set training.method to full.")
    return "full" if not has_adapter else "qlora" if four or "qlora" in stated else "lora"
