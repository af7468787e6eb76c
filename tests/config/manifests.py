"""Small manifests, loaded as in a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from expertflow.config.guard import one_line
from expertflow.config.load import load_config, load_expert


def base() -> dict[str, Any]:
    return {
        "description": "d",
        "model": "builtin:tiny-qwen3",
        "sources": [{"name": "s", "kind": "local", "path": "x.jsonl", "text": "{body}"}],
        "evaluation": {"task": "held_out_loss"},
    }


def load(
    tmp_path: Path, value: dict[str, Any], *, told: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(value))
    settings = load_config({"experts": {"e": {}}, **config})
    return load_expert("e", folders=[tmp_path], config=settings, told=[told or {}])


def source(**keys: Any) -> dict[str, Any]:
    generated = {"generator": "facts", "n_documents": 9}
    places = {"local": {"path": "x"}, "git": {"path": "x"}, "hub": {"id": "x/y"}}
    kind = keys.get("kind", "local")
    whole = {} if {"messages", "text"} & set(keys) else {"text": "{a}"}
    return {"name": "src", "kind": kind, **places.get(kind, generated), **whole, **keys}


def list_errors(tmp_path: Path, value: dict[str, Any], **config: Any) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        one_line(load)(tmp_path, value, **config)
    lines = str(caught.value).splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ").replace(f"{tmp_path}/", "") for line in lines]
