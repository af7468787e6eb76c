"""Translate the data sets that another trainer's file names into sources."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from expertflow.config.read_yaml import Settings
from expertflow.core.format import linux_path

NAMES = ("dataset_name", "data_path", "dataset_path", "train_path", "train_file")
# As a data set's path: the format of its ``data_files``.
FORMATS = ("json", "csv", "parquet", "arrow", "text")
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".yaml", ".gz", ".zst")
ALPACA = {"prompt": "{instruction}\n{input?}", "completion": "{output}"}
# Axolotl's own prompts have these parts, each with a field_* key for another field.
PARTS = ("instruction", "input", "output")
# Keys of a data set that are read here, or only say how to load it.
READ = {
    "id", "path", "name", "config", "revision", "split", "data_files", "ds_type", "streaming",
    "weight", "max_samples", "columns", "type", "field", "field_mapping", "field_messages",
    "message_property_mappings", "message_field_role", "message_field_content",
}  # fmt: skip
# Splits that other trainers only evaluate on; here documents are held out by a share.
HELD_OUT = ("test", "val", "eval", "dev")
# A range as sources of kind hub read it.
RANGE = re.compile(r"[^\[\]]+\[\d*:\d*\]")


def list_sources(found: Settings, notes: list[str]) -> Iterator[Settings]:
    """Yield sources for the data sets that a file names; notes say what the user should check."""
    given = found.get("datasets") or found.get("dataset_mixture") or found.get("dataset")
    if isinstance(given, dict):
        # The handbook's test_split_size is a number of documents, our eval_fraction a share.
        if "datasets" in given and (left := sorted(given.keys() - {"datasets"})):
            notes.append(f"Left out: {', '.join(left)}; data.eval_fraction holds documents out.")
        given = given.get("datasets", [given])
    if isinstance(mixer := found.get("dataset_mixer"), dict):
        # The alignment handbook's: a weight per data set, and splits of all of them.
        splits = found.get("dataset_splits")
        given = [{"id": key, "weight": weight, "split": splits} for key, weight in mixer.items()]
    name = next((found[key] for key in NAMES if found.get(key)), None)
    if given is None and name is not None:
        config, split = found.get("dataset_config"), found.get("dataset_train_split")
        files = found.get("data_files")
        given = [{"id": str(name), "config": config, "split": split, "data_files": files}]
    given = given.split(",") if isinstance(given, str) else given
    if found.get("train_dataset"):
        # A list of data sets; the user names them one by one.
        given = [{"path": str(Path(found["train_dataset"]).with_suffix(".jsonl"))}]
    counted: Counter[str] = Counter()
    read = (one for each in given or [{}] for one in _list_splits(each, found, notes))
    for one in (file for each in read for file in _list_files(each)):
        source = _source(one, found, notes)
        # owner/some.name -> some: names of sources go into paths.
        stem = Path(source.get("id") or source["path"]).stem
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "data"
        counted[stem] += 1
        if "[" in (split := str(one.get("split"))) and split != source.get("split"):
            notes.append(f"{split} of {stem}: everything is read; max_documents limits it.")
        yield {"name": stem if counted[stem] == 1 else f"{stem}-{counted[stem]}", **source}
    notes.append("Check each source: its fields, its license, and where its files are.")


def _list_splits(given: Settings | str, found: Settings, notes: list[str]) -> Iterator[Settings]:
    one = given if isinstance(given, dict) else _read_name(given, found)
    splits = one.get("split")
    for split in splits if isinstance(splits, list) else [splits]:
        if isinstance(splits, list) and str(split).startswith(HELD_OUT):
            name = one.get("id") or one.get("path")
            notes.append(f"{split} of {name} is not read: data.eval_fraction holds documents out.")
        else:
            yield {**one, "split": split}


def _read_name(given: str, found: Settings) -> Settings:
    # ms-swift: 500 of a/b are "a/b#500".
    name, _, n_rows = given.strip().partition("#")
    if "/" in name or Path(name).suffix in SUFFIXES:
        return {"path": name, "max_samples": int(n_rows) if n_rows.isdigit() else None}
    # LLaMA-Factory: a name from its dataset_info.json.
    kind = "completion" if found.get("stage") == "pt" else "alpaca"
    return {"path": f"{found.get('dataset_dir') or 'data'}/{name}.json", "type": kind}


def _list_files(one: Settings) -> list[Settings]:
    files, where = one.get("data_files"), one.get("id") or one.get("path")
    if not files or where not in FORMATS:
        return [one]
    if isinstance(files, dict):
        # By split.
        files = files.get(_split_name(one)) or next(iter(files.values()))
    files = [files] if isinstance(files, str) else files
    return [{**one, "id": None, "path": file, "data_files": None} for file in files]


def _split_name(one: Settings) -> str:
    return str(one.get("split") or "train").partition("[")[0]


def _source(one: Settings, found: Settings, notes: list[str]) -> Settings:
    where = str(one.get("id") or one.get("path") or "data/train.jsonl")
    path = linux_path(where)
    is_file = path != where or path.startswith((".", "/", "~")) or Path(path).suffix in SUFFIXES
    source: Settings = {"kind": "local", "path": path} if is_file else {"kind": "hub", "id": path}
    if not is_file:
        source["config"] = one.get("config") or one.get("name")
        source["revision"] = one.get("revision")
        # train is the default here, too, and null is left out below.
        split = rows if RANGE.fullmatch(rows := str(one.get("split"))) else _split_name(one)
        source["split"] = split if split != "train" else None
        source["options"] = {"data_files": files} if (files := one.get("data_files")) else None
    # Keys with our default are left out, because people read the manifest.
    if (weight := one.get("weight")) not in (None, 1.0):
        source["weight"] = weight
    source["max_documents"] = one.get("max_samples") or found.get("max_samples")
    if left := sorted(key for key in one.keys() - READ if not key.startswith("_")):
        notes.append(f"Left out of data set {where}: {', '.join(left)}.")
    text = found.get("dataset_text_field")
    kind = one.get("type") or ("completion" if text else "chat_template")
    if isinstance(kind, dict):
        source |= _fill_prompts(kind, notes)
    elif (mapping := one.get("field_mapping")) or kind == "completion":
        text = (mapping or {}).get("text") or one.get("field") or text or "text"
        source["text"] = f"{{{text}}}"
    elif kind.startswith(("alpaca", "gpteacher")) and "." not in kind:
        source |= ALPACA | ({"completion": "{response}"} if kind[0] == "g" else {})
        if "base_model" in found:
            notes.append(f"{where}: instead of Alpaca's headings, the chat template is used.")
    else:
        if not kind.startswith(("chat_template", "sharegpt")):
            notes.append(f"{where}: type {kind} is unknown here; set the fields of its records.")
        names = one.get("message_property_mappings") or {}
        default = "conversations" if kind.startswith("sharegpt") else "messages"
        source["messages"] = one.get("field_messages") or default
        source["role_key"] = one.get("message_field_role", names.get("role"))
        source["content_key"] = one.get("message_field_content", names.get("content"))
    return {key: value for key, value in source.items() if value is not None}


def _fill_prompts(given: Settings, notes: list[str]) -> Settings:
    """Return prompt and completion for Axolotl's own prompts: a format, and a field per part."""
    fields = {part: given.get(f"field_{part}") or part for part in PARTS}
    fields["input"] += "?"
    own = {"prompt": given.get("format") or ALPACA["prompt"], "completion": "{output}"}
    if given.get("format"):
        notes.append("The chat template surrounds a prompt: remove marks such as [INST] from it.")
    if left := sorted(given.keys() - {"format", *(f"field_{part}" for part in PARTS)}):
        notes.append(f"Left out of a data set's type: {', '.join(left)}.")
    part = re.compile(r"\{(?:field_)?(instruction|input|output)\??\}")
    return {key: part.sub(lambda m: f"{{{fields[m[1]]}}}", text) for key, text in own.items()}
