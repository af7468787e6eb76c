"""What is made from declarations and checked in: two JSON Schemas, and docs/settings.md."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from expertflow.core.settings import AUTO, JsonSchema, SettingInfo, json_schema, list_settings
from expertflow.plan.settings import LoraSpec, TrainingSection
from expertflow.report.records import Report

HEAD = "# Made by workflow/scripts/write_settings.py from the declared {}; do not edit.\n"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
PAGE = """# Training settings

Made by `workflow/scripts/write_settings.py` from the declarations in
`workflow/scripts/expertflow/plan/settings.py`; do not edit.

Keys of `training` in a manifest.
"""
NAMES = {bool: "true or false", int: "integer", float: "number", str: "text"}
WORDS = {
    "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most",
    "exclusiveMaximum": "below",
}  # fmt: skip


def render_files(root: Path) -> dict[Path, str]:
    training = {
        "$id": "training.schema.yaml",
        "description": "Training settings; auto is resolved by the plan, with a reason.",
        **json_schema(TrainingSection),
    }
    report = msgspec.json.schema(Report)
    return {
        root / "workflow" / "schemas" / "training.schema.yaml": _write("settings", training),
        root / "workflow" / "schemas" / "report.schema.yaml": _write(
            "records of the report", report, default_flow_style=None
        ),
        root / "docs" / "settings.md": _page(),
    }


def _write(declared: str, schema: JsonSchema, **style: Any) -> str:
    # In the order of the declarations; width as in the code.
    style |= {"sort_keys": False, "width": 100, "allow_unicode": True}
    return HEAD.format(declared) + str(yaml.safe_dump({"$schema": DRAFT, **schema}, **style))


def _page() -> str:
    rows = [_row(f"lora.{setting.name}", setting) for setting in list_settings(LoraSpec)]
    lines = []
    for setting in list_settings(TrainingSection):
        # One row of a struct would say nothing: its settings stand in its place.
        lines += rows if setting.kind is LoraSpec else [_row(setting.name, setting)]
    table = ["| setting | value | default | |", "|---|---|---|---|", *lines]
    return PAGE + "\n" + "\n".join(table) + "\n"


def _row(name: str, setting: SettingInfo) -> str:
    default = setting.schema.get("default")
    shown = "null" if default is None else _text(default)
    value = " ".join(_value(setting))
    return f"| `{name}` | {value} | {shown} | {setting.text} |"


def _value(setting: SettingInfo) -> Iterator[str]:
    schema: JsonSchema = setting.plain_schema
    if "enum" in schema:
        yield ", ".join(schema["enum"])
    else:
        yield NAMES.get(setting.kind, "list of texts")
    bounds = [f"{word} {schema[key]:g}" for key, word in WORDS.items() if key in schema]
    if bounds:
        yield " and ".join(bounds)
    if setting.auto:
        yield f"or {AUTO}"
    elif isinstance(setting.schema.get("type"), list):
        yield "or null"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, list) else str(value)
