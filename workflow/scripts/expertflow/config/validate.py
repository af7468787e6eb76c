"""Find settings files and check them against their JSON Schemas, with one line per fault."""

import copy
import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import jsonschema
from jsonschema.exceptions import ValidationError

from expertflow.config.read_yaml import SUFFIXES, Settings, read_yaml, suggest_name
from expertflow.core.errors import ConfigError, raise_faults
from expertflow.core.settings import JsonSchema, json_schema, name_of
from expertflow.data.sources.registry import declare_kinds
from expertflow.evaluate.scoring import task_names
from expertflow.plan.records import Claim
from expertflow.plan.settings import TrainingSection

# The folder of the Snakefile that this library belongs to.
BASEDIR = Path(__file__).parents[4]
# The user's own settings, below the working directory, override the shipped ones.
FOLDERS = (Path("config"), BASEDIR / "config")
WORDS = {"true": True, "false": False, "null": None}
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@cache
def read_table() -> Settings:
    """Map the keys of other trainers to ours (``ours``), or to a reason against them (``why``)."""
    table: Settings = read_yaml(Path(__file__).with_name("other_trainers.yaml"))
    for part in ("ours", "why"):
        table[part] = {key: value for value, keys in table[part].items() for key in keys}
    return table


def former_names() -> dict[str, str]:
    """Map other trainers' names of settings to ours, which are relative to the same object."""
    return {old: ours.partition(".")[2] or ours for old, ours in read_table()["ours"].items()}


@cache
def find_places(key: str) -> list[str]:
    """List the objects of a manifest that have a key, by dotted names."""
    root, found = read_schema("expert"), []

    def walk(schema: JsonSchema, place: str) -> None:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if key in schema.get("properties", {}):
            found.append(place or "the manifest itself")
        for name, part in schema.get("properties", {}).items():
            walk(part.get("items", part), f"{place}.{name}".removeprefix("."))

    walk(root, "")
    return found


@cache
def read_schema(name: str) -> JsonSchema:
    """Read a schema from its file; training, claims, kinds and tasks are declared in code."""
    schema: JsonSchema = read_yaml(BASEDIR / "workflow" / "schemas" / f"{name}.schema.yaml")
    if name == "expert":
        schema["$defs"]["training"] = json_schema(TrainingSection)
        claims = {**json_schema(Claim), "required": [name_of(Claim.text)]}
        schema["properties"]["claims"]["items"] = claims
        declare_kinds(schema["$defs"]["source"])
        schema["properties"]["evaluation"]["properties"]["task"]["else"]["enum"] = task_names()
    return schema


def read_checked(path: Path, schema: str) -> Any:
    value = read_yaml(path)
    check(value, read_schema(schema), where=str(path))
    return value


def list_files(folders: Iterable[Path]) -> dict[str, Path]:
    """List settings files by their stems; the first folder that has a name wins."""
    found = [path for folder in folders for end in SUFFIXES for path in folder.glob(f"*{end}")]
    # Reversed, so that the first folder's file of a name is written last and wins.
    return {path.stem: path for path in reversed(found)}


def find_file(name: str, folders: Sequence[Path], problem: str) -> Path:
    """Find a settings file; ConfigError with the problem, and the nearest name, if none has it."""
    known = list_files(folders)
    if name not in known:
        closed = [place for place in folders if place.is_dir() and not os.access(place, os.R_OK)]
        if closed:
            raise ConfigError(f"{closed[0]}: cannot be read; correct its permissions")
        raise ConfigError(f"{problem}; {suggest_name(name, known)}")
    found = known[name]
    # Otherwise whoever edits the one that is not read would wonder why nothing changes.
    others = {found.with_name(f"{name}{end}") for end in SUFFIXES} - {found}
    if sibling := next(filter(Path.is_file, others), None):
        raise ConfigError(f"{found}: {sibling.name} next to it has the same name; remove one")
    return found


def check(value: Any, schema: JsonSchema, *, where: str) -> None:
    """Raise a ConfigError with the place, key, value and fix of every fault."""
    raise_faults(f"{where}: {text}" for _, text in find_faults(value, schema))


def find_faults(value: Any, schema: JsonSchema) -> Iterator[tuple[list[str | int], str]]:
    """Yield the keys of each fault's place, and a line with what is wrong and the fix.

    Faults that disappear when another one is fixed are left out.
    """
    validator = jsonschema.Draft202012Validator(schema)
    # In path order, so that the same fault always comes first.
    errors = sorted(validator.iter_errors(value), key=_place)
    for _, group in groupby(errors, _place):
        at_place = list(group)
        of_type = [error for error in at_place if error.validator == "type"]
        meant = {_meant(*pair) for error in at_place for pair in _unknown(error)}
        for error in of_type or at_place:
            # The branch of a oneOf or anyOf that matches best, if one clearly does.
            yield from _describe(jsonschema.exceptions.best_match([error]) or error, meant)


def _place(error: ValidationError) -> list[str]:
    return list(map(str, error.absolute_path))


def _unknown(error: ValidationError) -> list[tuple[str, list[str]]]:
    """List the unknown keys of an object, each with the known ones."""
    if error.validator != "additionalProperties":
        return []
    known = sorted(cast(Any, error.schema).get("properties", {}))
    return [(key, known) for key in sorted(map(str, set(cast(Any, error.instance)) - set(known)))]


def _describe(error: ValidationError, meant: set[str]) -> Iterator[tuple[list[str | int], str]]:
    """Yield a fault, or one for each key; none for keys that unknown ones are ``meant`` to be."""
    keys, schema, instance = list(error.absolute_path), cast(Any, error.schema), error.instance
    rule: Any = error.validator_value
    if error.validator == "additionalProperties":
        for unknown, known in _unknown(error):
            key = ".".join(map(str, [*keys, unknown]))
            yield [*keys, unknown], f"unknown key {key!r}; {_hint(unknown, known)}"
    elif error.validator == "required":
        for missing in (key for key in rule if key not in cast(Any, instance) and key not in meant):
            key = ".".join(map(str, [*keys, missing]))
            text = schema.get("properties", {}).get(missing, {}).get("description", "")
            yield keys, f"key {key!r} is missing; add it" + (f" ({text})" if text else "")
    elif error.validator != "oneOf" or not any(meant & {*b.get("required", ())} for b in rule):
        yield keys, _describe_value(error)


def _describe_value(error: ValidationError) -> str:
    path = ".".join(map(str, error.absolute_path))
    if isinstance(error.instance, dict) and error.validator == "oneOf":
        # Its keys are the point; the complete value, truncated, would hide them.
        value = f"has {', '.join(map(str, error.instance)) or 'nothing'}"
    else:
        value = repr(error.instance)
        value = f"is {value if len(value) <= 60 else value[:57] + '...'}"
    return f"key {path!r} {value}: {_problem(error)}" if path else f"{value}: {_problem(error)}"


def convert_texts(value: Any, schema: JsonSchema | None, root: JsonSchema) -> Any:
    """Convert texts to the numbers, booleans and nulls that a value's schema expects.

    ``--config 'training={max_steps: 30}'`` is an object of texts to Snakemake. ``root`` has the
    definitions that the schema refers to. What no schema describes stays as it is.
    """
    if schema is None:
        return value
    target = root["$defs"][schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema
    branches = [target, *target.get("oneOf", ())]
    if isinstance(value, dict):
        return {key: convert_texts(item, _part(branches, key), root) for key, item in value.items()}
    if isinstance(value, list):
        items = next((branch["items"] for branch in branches if "items" in branch), None)
        return [convert_texts(item, items, root) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    return _convert_text(value, branches) if isinstance(value, str) else value


def _part(branches: list[JsonSchema], key: str) -> JsonSchema | None:
    for branch in branches:
        # Sources, a list in a manifest, are addressed by name on the command line.
        others = branch.get("additionalProperties") or branch.get("items")
        part = branch.get("properties", {}).get(key, others)
        if isinstance(part, dict):
            return part
    return None


def _convert_text(text: str, branches: list[JsonSchema]) -> Any:
    types = [branch["type"] for branch in branches if "type" in branch]
    kinds = {kind for one in types for kind in ([one] if isinstance(one, str) else one)}
    # The bar of an acceptance rule may be anything.
    is_free = not kinds and not any("enum" in branch or "const" in branch for branch in branches)
    if text in WORDS:
        is_allowed = is_free or ("null" if text == "null" else "boolean") in kinds
        return WORDS[text] if is_allowed else text
    if NUMBER.fullmatch(text) is None or not (is_free or kinds & {"integer", "number"}):
        return text
    if text.lstrip("+-").isdigit():
        return int(text)
    number = float(text)
    # An integer setting may be written 1e9.
    return int(number) if "integer" in kinds and number.is_integer() else number


def with_defaults(value: Any, schema: JsonSchema, root: JsonSchema | None = None) -> Any:
    """Fill in the defaults of every object, depth first; the input is not modified.

    A text that stands for a list becomes one.
    """
    root = root if root is not None else schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    # "targets: all-linear" is ["all-linear"].
    if isinstance(value, str) and "oneOf" in schema and schema["oneOf"][0].get("type") == "array":
        return [value]
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"], root) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return copy.deepcopy(value)
    result = copy.deepcopy(value)
    for key, sub in schema["properties"].items():
        if key in result:
            result[key] = with_defaults(result[key], sub, root)
        elif "default" in sub:
            result[key] = with_defaults(sub["default"], sub, root)
    return result


def _of_type(rule: Any, instance: Any) -> str:
    must = f"it must be of type {rule if isinstance(rule, str) else ' or '.join(rule)}"
    if "string" in rule and isinstance(instance, int | float):
        return f"{must}; put it in quotes"
    if not isinstance(instance, str) or NUMBER.fullmatch(instance) is None:
        return must
    # In quotes, or 1e9, which stays text, because it may be a commit ID.
    number = float(instance)
    return f"{must}; write it as {int(number) if number.is_integer() else number}"


def _one_of(rule: Any, instance: Any) -> str:
    near = difflib.get_close_matches(str(instance), [str(value) for value in rule], n=1)
    return f"it must be one of {rule}" + (f"; did you mean {near[0]!r}?" if near else "")


def _meant(unknown: str, known: list[str]) -> str:
    """Return the known key that an unknown one stands for; empty if there is none."""
    new = former_names().get(unknown, "").split(".")[0]
    if find_places(unknown):
        return ""
    near = difflib.get_close_matches(unknown, known, n=1)
    return new if new in known else "".join(near)


def _hint(unknown: str, known: list[str]) -> str:
    if why := read_table()["why"].get(unknown):
        return f"{why}; remove it"
    new = former_names().get(unknown, "")
    if new.split(".")[0] in known:
        return f"it is called {new!r} here (docs/migration.md)"
    places = find_places(unknown)
    if not places and unknown in read_schema("config")["properties"]:
        places = ["config/config.yaml"]
    if places:
        return f"it is a key of {' or '.join(places)}; move it there"
    return suggest_name(unknown, known, f"known keys: {', '.join(known)}")


def _problem(error: ValidationError) -> str:
    schema: Any = error.schema
    purpose = str(schema.get("description", "")) if isinstance(schema, dict) else ""
    explain = PROBLEMS.get(str(error.validator))
    problem = explain(error.validator_value, error.instance) if explain else error.message
    return f"{problem} ({purpose})" if purpose else problem


def _alternatives(branches: Any, _: Any) -> str:
    parts = []
    for branch in branches:
        if "required" in branch:
            parts.append("with " + " and ".join(branch["required"]))
        elif "const" in branch:
            parts.append(repr(branch["const"]))
        else:
            parts.append(str(branch.get("type", branch)))
    return "it must be exactly one of: " + "; ".join(parts)


# Each schema rule's requirement in words, from its value and the setting that broke it.
PROBLEMS: dict[str, Callable[[Any, Any], str]] = {
    "type": _of_type,
    "enum": _one_of,
    "minimum": lambda rule, _: f"it must be at least {rule}",
    "maximum": lambda rule, _: f"it must be at most {rule}",
    "exclusiveMinimum": lambda rule, _: f"it must be above {rule}",
    "exclusiveMaximum": lambda rule, _: f"it must be below {rule}",
    "minItems": lambda rule, _: f"it needs at least {rule} item",
    "pattern": lambda rule, _: f"it must match {rule}",
    "oneOf": _alternatives,
}
