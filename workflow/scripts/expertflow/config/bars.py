"""Find acceptance bars on what no report contains, before a training is paid for."""

import re
from collections.abc import Iterator
from functools import cache

import msgspec

from expertflow.config.read_yaml import Settings, suggest_name
from expertflow.core.settings import JsonSchema
from expertflow.report.records import Report

NOWHERE: JsonSchema = {"anyOf": []}


def find_wrong_bars(rules: list[Settings]) -> Iterator[str]:
    """Yield a line for each bar on a path that no report has, with the unknown key."""
    for rule in rules:
        places = list(_plain(_report()))
        # evaluation.baselines[0].n -> evaluation, baselines, 0, n
        for key in re.findall(r"[^.\[\]]+", rule["path"]):
            known = {name for place in places for name in place.get("properties", ())}
            places = [below for place in places for below in _below(place, key)]
            if not places:
                hint = suggest_name(key, known, "workflow/schemas/report.schema.yaml lists all")
                fault = f"report.json has no path {rule['path']!r}, as {key!r} is unknown"
                yield f"acceptance: {fault}; {hint}"
                break


@cache
def _report() -> JsonSchema:
    schema = msgspec.json.schema(Report)
    # They follow from the bars.
    for key in ("acceptance", "verdict"):
        del schema["$defs"][Report.__name__]["properties"][key]
    return schema


def _below(place: JsonSchema, key: str) -> Iterator[JsonSchema]:
    kind, more = place.get("type"), place.get("additionalProperties")
    if "properties" in place:
        yield from _plain(place["properties"].get(key, NOWHERE))
    elif isinstance(more, dict):
        yield from _plain(more)
    elif kind == "array" and key.isdigit():
        for item in (place.get("items"), *place.get("prefixItems", ())):
            if isinstance(item, dict):
                yield from _plain(item)
    elif kind in (None, "object") and "enum" not in place:
        # Free-form: the values of settings or machines.
        yield {}


def _plain(schema: JsonSchema) -> Iterator[JsonSchema]:
    if "$ref" in schema:
        schema = _report()["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" not in schema:
        yield schema
    for choice in schema.get("anyOf", ()):
        yield from _plain(choice)
