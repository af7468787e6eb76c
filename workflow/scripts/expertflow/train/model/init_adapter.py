"""Find the adapter that a training continues from, compare it with the settings, and load it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertflow.core.errors import ConfigError, TrainingError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.plan.settings import LoraSpec
from expertflow.train.model.base import hash_weights
from expertflow.train.records import ModelRecord

FILES = ("adapter_config.json", "adapter_model.safetensors")
# Initializations of an adapter that also change the base.
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


def hash_adapter(lora: LoraSpec, sha256: Callable[[Path], str] = sha256_file) -> str:
    """Hash the adapter to continue from; raise ConfigError if the settings differ from its own."""
    folder = _folder(lora)
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigError(
                f"training.lora.init_from: {folder} has no {name}; choose a folder in which peft"
                " saved a LoRA adapter as safetensors; to fetch one from the hub, run"
                " hf download ORG/NAME --local-dir FOLDER"
            )
    config = _read_config(folder)
    own = {
        "peft_type": "LORA",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
        # Another scaling for some layers, which the settings cannot express.
        "alpha_pattern": {},
    }
    for key, value in own.items():
        there = config.get(key) or type(value)()
        if there != value:
            raise ConfigError(
                f"training.lora.init_from: {folder} has {key} {there}, but the settings have"
                f" {value}; make them equal, or merge it into the base model"
            )
    if str(config.get("init_lora_weights")).lower().startswith(CHANGED_BASE):
        raise ConfigError(
            f"training.lora.init_from: {folder} was initialized by {config['init_lora_weights']},"
            " which also changes the base; merge it into the base model"
        )
    return sha256_json([sha256(folder / name) for name in FILES])


def load_init_adapter(net: Any, lora: LoraSpec, model: ModelRecord) -> None:
    """Load the adapter's weights into a new one; raise TrainingError if they do not fit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    folder = _folder(lora)
    if hash_adapter(lora) != lora.init_sha256:
        raise TrainingError(f"{folder}: the adapter changed since the plan was made; run again")
    _check_base(_read_config(folder), folder, model)
    saved = load_file(folder / FILES[1])
    own = get_peft_model_state_dict(net, save_embedding_layers=False)
    for name in sorted(saved.keys() | own.keys()):
        there, here = (tuple(t[name].shape) if name in t else "none" for t in (saved, own))
        if there != here:
            raise TrainingError(
                f"training.lora.init_from: {folder} has {there} as {name}, but training.lora makes"
                f" {here}; set the targets and modules_to_save of that adapter"
            )
    set_peft_model_state_dict(net, saved)


def _folder(lora: LoraSpec) -> Path:
    return Path(lora.init_from or "").expanduser()


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / FILES[0]).read_bytes()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder / FILES[0]}: not a JSON object ({error!s:.80})") from error


def _check_base(config: dict[str, Any], folder: Path, model: ModelRecord) -> None:
    base, revision = str(config.get("base_model_name_or_path")), config.get("revision")
    if base == model.name and revision in (None, model.revision):
        return
    if Path(base).is_dir() and hash_weights(Path(base)) == model.weights_sha256:
        return
    at = f" at {revision}" if revision else ""
    raise TrainingError(
        f"training.lora.init_from: {folder} is an adapter of {base}{at}, but the model is"
        f" {model.name}; use that model, or correct base_model_name_or_path in its {FILES[0]}"
    )
