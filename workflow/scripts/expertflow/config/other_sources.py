"""Translate the data sets that another trainer's file names into sources."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from expertflow.config.read_yaml import Settings

NAMES = ("dataset_name", "data_path", "dataset_path", "train_path")
ALPACA = {"prompt": "{instruction}\n{input?}", "completion": "{output}"}
_DRIVE = re.compile(r"([A-Za-z]):[\\/](.*)")


def linux_path(name: str) -> str:
    """Translate a Windows path into its WSL path.

    >>> linux_path("F:/models/Qwen3-0.6B"), linux_path("Qwen/Qwen3-0.6B")
    ('/mnt/f/models/Qwen3-0.6B', 'Qwen/Qwen3-0.6B')
    """
    found = _DRIVE.fullmatch(name)
    if found is None:
        return name
    drive, rest = found.groups()
    return f"/mnt/{drive.lower()}/" + rest.replace("\\", "/")


def list_sources(found: Settings, notes: list[str]) -> Iterator[Settings]:
    """Yield sources for the data sets that a file names; notes say what the user should check."""
    given = found.get("datasets") or found.get("dataset_mixture") or found.get("dataset")
    given = given.get("datasets", [given]) if isinstance(given, dict) else given
    name = next((found[key] for key in NAMES if found.get(key)), None)
    if given is None and name is not None:
        config, split = found.get("dataset_config"), found.get("dataset_train_split")
        given = [{"id": str(name), "config": config, "split": split}]
    if isinstance(given, str):
        # LLaMA-Factory: names from its dataset_info.json, separated by commas.
        kind = "completion" if found.get("stage") == "pt" else "alpaca"
        given = [{"path": f"data/{one.strip()}.json", "type": kind} for one in given.split(",")]
    if found.get("train_dataset"):
        # A list of data sets; the user names them one by one.
        given = [{"path": str(Path(found["train_dataset"]).with_suffix(".jsonl"))}]
    counted: Counter[str] = Counter()
    for one in given or [{"path": "data/train.jsonl"}]:
        source = _source(one, found)
        # owner/some.name -> some: names of sources go into paths.
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source.get("id") or source["path"]).stem)
        counted[stem] += 1
        if "[" in (split := str(one.get("split"))):
            notes.append(f"{split} of {stem}: everything is read; max_documents limits it.")
        yield {"name": stem if counted[stem] == 1 else f"{stem}-{counted[stem]}", **source}
    notes.append("Check each source: its fields, its license, and where its files are.")


def _source(one: Settings, found: Settings) -> Settings:
    where = str(one.get("id") or one.get("path") or "data/train.jsonl")
    path = linux_path(where)
    is_file = path != where or Path(path).suffix in (".json", ".jsonl", ".csv", ".parquet", ".yaml")
    source: Settings = {"kind": "local", "path": path} if is_file else {"kind": "hub", "id": path}
    if not is_file:
        source["config"] = one.get("config") or one.get("name")
        split = str(one.get("split") or "train").partition("[")[0]
        # train is the default here, too, and null is left out below.
        source["split"] = split if split != "train" else None
    # Keys with our default are left out, because people read the manifest.
    if (weight := one.get("weight")) not in (None, 1.0):
        source["weight"] = weight
    if found.get("max_samples"):
        source["max_documents"] = found["max_samples"]
    text = found.get("dataset_text_field")
    kind = str(one.get("type") or ("completion" if text else "chat_template"))
    default = "conversations" if kind.startswith("sharegpt") else "messages"
    field = one.get("field_messages") or default
    if (mapping := one.get("field_mapping")) or kind == "completion":
        text = (mapping or {}).get("text") or one.get("field") or text or "text"
        source["text"] = f"{{{text}}}"
    elif kind.startswith("alpaca"):
        source |= ALPACA
    else:
        names = one.get("message_property_mappings") or {}
        source |= {"messages": field, "role_key": one.get("message_field_role", names.get("role"))}
        source["content_key"] = one.get("message_field_content", names.get("content"))
    return {key: value for key, value in source.items() if value is not None}
