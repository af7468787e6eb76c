"""Read config.yaml and the manifests, merge presets and overrides, and refuse contradictions.

Later wins: schema defaults < manifest < its demo block (demo preset) < ``training`` of the
configuration < ``experts.{name}`` of the configuration. A manifest without a demo block is of the
full preset, whatever the configuration says.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from expertflow.config import validate
from expertflow.config.contradictions import (
    check_contradictions,
    check_durations,
    refuse_idle_keys,
)
from expertflow.config.read_yaml import SUFFIXES, at_line, check_values, read_yaml, scalars, suggest
from expertflow.config.stated import check_stated
from expertflow.core.errors import ConfigError
from expertflow.core.files import sha256_file
from expertflow.core.records import Record
from expertflow.core.settings import json_schema
from expertflow.data.sources.registry import declare_kinds, source_kinds
from expertflow.evaluate.scoring import task_names
from expertflow.plan.records import Origin
from expertflow.plan.settings import TrainingSection

INTEGER = re.compile(r"[+-]?\d+")
DECIMAL = re.compile(r"[+-]?\d*\.\d+")
# Snakemake's --config reads true as a string.
WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


class Schemas(Record, frozen=True, kw_only=True):
    config: dict[str, Any]
    expert: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "Schemas":
        """Read the schemas beside the rules; training, kinds and tasks are declared in code."""
        expert = read_yaml(directory / "expert.schema.yaml")
        expert["$defs"]["training"] = json_schema(TrainingSection)
        declare_kinds(expert["$defs"]["source"])
        expert["properties"]["evaluation"]["properties"]["task"]["else"]["enum"] = task_names()
        return cls(config=read_yaml(directory / "config.schema.yaml"), expert=expert)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay one tree of settings over another: objects merge key by key, all else is replaced.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merge(dict(old or {}), value) if both else value
    return result


def _numbers(value: Any) -> Any:
    """Convert texts that are numbers: Snakemake leaves them texts inside an object.

    Sources are left alone, where a revision or a name may be made of digits.
    """
    if isinstance(value, dict):
        return {k: item if k == "sources" else _numbers(item) for k, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if not isinstance(value, str):
        return value
    if INTEGER.fullmatch(value):
        return int(value)
    return float(value) if DECIMAL.fullmatch(value) else value


def load_config(config: dict[str, Any], schemas: Schemas) -> dict[str, Any]:
    """Check the workflow's configuration, as Snakemake merged it, and fill in defaults."""
    config = _numbers(scalars(config, words=WORDS))
    check_values(config, Path("config/config.yaml"))
    validate.check(config, schemas.config, where="config/config.yaml")
    result: dict[str, Any] = validate.with_defaults(config, schemas.config)
    return result


def find_manifest(name: str, directories: list[Path]) -> Path:
    """Find an expert's manifest in the first directory that has it.

    Raises ConfigError, naming the nearest expert, if none does.
    """
    for directory in directories:
        for suffix in SUFFIXES:
            if (path := directory / f"{name}{suffix}").is_file():
                return path
    known = sorted({p.stem for d in directories for p in d.glob("*") if p.suffix in SUFFIXES})
    hint = suggest(name, known, f"known experts are {', '.join(known)}")
    raise ConfigError(f"no manifest for expert {name!r} (config/experts/{name}.yaml); {hint}")


def manifest_here(name: str, directories: list[Path]) -> str | None:
    try:
        return sha256_file(find_manifest(name, [d / "experts" for d in directories]))
    except ConfigError:
        return None


def load_expert(
    name: str,
    *,
    directories: list[Path],
    config: dict[str, Any],
    schemas: Schemas,
    bundled: Collection[str] | None = None,
    told: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an expert's settings, checked and complete.

    ``bundled`` names files of the user that may be absent, as a bundle tells what they hold.
    ``told`` is what of the configuration the command line says. ``preset`` is that of the settings;
    ``setting_origins`` says where the training settings come from.

    Raises:
        ConfigError: the manifest, or an override of it, is wrong; names file, key, value and fix.
    """
    path = find_manifest(name, directories)
    manifest = read_yaml(path)
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path}: holds no settings; see config/experts/ for examples")
    check_durations(manifest, where=str(path))
    validate.check(manifest, schemas.expert, where=str(path), at=lambda keys: at_line(path, keys))
    check_stated(manifest, where=str(path))
    demo = manifest.pop("demo", {}) if config["preset"] == "demo" else {}
    manifest.pop("demo", None)
    preset = "demo" if demo else "full"
    merged = merge(merge(manifest, demo), {"training": config["training"]})
    own = config["experts"].get(name) or {}
    if "demo" in own:
        raise ConfigError(
            f"config: experts.{name}.demo has no effect; give its keys to experts.{name} itself"
        )
    if isinstance(own.get("sources"), dict):
        own = {**own, "sources": _named_sources(name, merged["sources"], own["sources"], schemas)}
    merged = merge(merged, own)
    where = f"{path} with {'its demo block and ' if demo else ''}overrides"
    check_durations(merged, where=where)
    validate.check(merged, schemas.expert, where=where)
    refuse_idle_keys(merged, where=where)
    result: dict[str, Any] = validate.with_defaults(merged, schemas.expert)
    for source in result["sources"]:
        if source["scan_secrets"] is None:
            source["scan_secrets"] = source_kinds()[source["kind"]].scan_secrets
    check_contradictions(result, where=where, bundled=bundled)
    told = told_training(told or {}, name)
    layers: list[tuple[Origin, Collection[str]]] = [
        ("manifest", manifest.get("training", {})),
        *(("overlay", layer.get("training") or {}) for layer in (demo, config, own)),
        ("command line", {**told["training"], **told["experts"][name]["training"]}),
    ]
    # The last to name a setting wins.
    origins = {key: origin for origin, keys in layers for key in keys}
    return {**result, "preset": preset, "setting_origins": origins}


def told_training(told: dict[str, Any], expert: str) -> dict[str, Any]:
    """Cut out of what the command line says what is about the training of an expert."""
    own = ((told.get("experts") or {}).get(expert) or {}).get("training") or {}
    return {"training": told.get("training") or {}, "experts": {expert: {"training": own}}}


def _named_sources(
    expert: str, sources: list[dict[str, Any]], changes: dict[str, Any], schemas: Schemas
) -> list[dict[str, Any]]:
    """Return the sources with overrides by name; ConfigError if there is no such source."""
    names = [source["name"] for source in sources]
    known = schemas.expert["$defs"]["source"]["properties"]
    numeric = {key for key, schema in known.items() if {"integer", "number"} & _kinds(schema)}
    for name, change in changes.items():
        place = f"config: experts.{expert}.sources.{name}"
        if name not in names:
            hint = suggest(name, names, f"its sources are {', '.join(names)}")
            raise ConfigError(f"{place}: the expert has no such source; {hint}")
        if not isinstance(change, dict):
            raise ConfigError(
                f"{place} is {change!r}; give keys and values, e.g. {{path: a.jsonl}}"
            )
    read = {
        name: {key: _numbers(value) if key in numeric else value for key, value in change.items()}
        for name, change in changes.items()
    }
    return [merge(source, read.get(source["name"], {})) for source in sources]


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)
