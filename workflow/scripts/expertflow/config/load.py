"""Read config.yaml and the manifests, merge presets and overrides, and refuse contradictions.

Later wins: schema defaults < manifest < its demo block (demo preset) < ``training`` of the
configuration < ``experts.{name}`` of the configuration < the same two of the command line. A
manifest without a demo block always has the full preset, whatever the configuration says.
"""

import json
import shlex
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from expertflow.config.contradictions import (
    find_contradictions,
    find_idle_keys,
    find_idle_overrides,
)
from expertflow.config.read_yaml import Settings, at_line, check_values, read_yaml, suggest_name
from expertflow.config.validate import (
    check,
    convert_texts,
    find_faults,
    find_file,
    read_schema,
    with_defaults,
)
from expertflow.core.errors import ConfigError, raise_faults
from expertflow.core.files import sha256_file
from expertflow.core.settings import name_of
from expertflow.data.sources.registry import source_kinds
from expertflow.plan.settings import TrainingSection

# Where a value may come from, as a manifest states it below ``origins``.
ORIGINS = {
    "source": "from the source system",
    "public": "from a public recipe",
    "own": "chosen here",
}

BOUNDS = {name_of(TrainingSection.min_epochs), name_of(TrainingSection.max_epochs)}
MAX_STEPS, TARGET = name_of(TrainingSection.max_steps), name_of(TrainingSection.target_tokens)
# Each length of a run, and the settings that would silence it, or have no effect beside it.
LENGTHS = {
    name_of(TrainingSection.num_train_epochs): {MAX_STEPS, TARGET, *BOUNDS},
    MAX_STEPS: {TARGET, *BOUNDS},
    TARGET: {MAX_STEPS},
}


def merge_settings(base: Settings, over: Settings) -> Settings:
    """Lay one tree of settings over another: objects merge key by key, all else is replaced.

    >>> merge_settings({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merge_settings(dict(old or {}), value) if both else value
    return result


def lay_over(base: Settings, over: Settings) -> Settings:
    """Merge settings, in which a length of the run replaces one of another kind."""
    result, given = merge_settings(base, over), over.get("training") or {}
    for key, others in LENGTHS.items():
        if given.get(key) is not None:
            for other in others - given.keys():
                result["training"].pop(other, None)
    return result


def load_config(config: Settings, told: Settings | None = None) -> Settings:
    """Check the workflow's configuration, as Snakemake merged it, and fill in defaults.

    ``told`` is the part from the command line; a fault in it is not one of the file.
    """
    schema, expert = read_schema("config"), read_schema("expert")
    overrides = {
        "training": expert["$defs"]["training"],
        "experts": {"additionalProperties": {**expert, "type": ["object", "null"]}},
    }
    known = {"properties": {**schema["properties"], **overrides}}
    config, told = (convert_texts(part, known, expert) for part in (config, told or {}))
    check_values(told, Path("--config"))
    check_values(config, Path("config/config.yaml"))
    raise_faults(
        f"{_origin_of(keys, told)}: {_explain_place(keys, config, told) or text}"
        for keys, text in find_faults(config, schema)
    )
    result: Settings = with_defaults(config, schema)
    return result


def _explain_place(keys: list[str | int], config: Settings, told: Settings) -> str:
    """Explain where an unknown key that a manifest has belongs; empty for any other fault."""
    key, expert = ".".join(map(str, keys)), read_schema("expert")
    if key not in config or key in read_schema("config")["properties"]:
        return ""
    what, place = "a key of an expert", f"{{{key}: {json.dumps(config[key], default=str)}}}"
    if key in expert["$defs"]["training"]["properties"]:
        what, place = "a setting of training", f"training={place}"
    elif key in expert["properties"]:
        place = f"experts={{NAME: {place}}}"
    else:
        return ""
    fix = f"--config {shlex.quote(place)}" if key in told else place.replace("=", ": ", 1)
    return f"{key!r} is {what}; write {fix}"


def _origin_of(keys: list[str | int], told: Any) -> str:
    for key in keys:
        if isinstance(told, dict) and key not in told:
            return "config/config.yaml"
        # Anything but an object came from the command line as a whole.
        told = told[key] if isinstance(told, dict) else None
    return "--config" if keys else "config/config.yaml"


def find_manifest(name: str, folders: Sequence[Path]) -> Path:
    problem = f"no manifest for expert {name!r} (config/experts/{name}.yaml)"
    return find_file(name, folders, problem)


def hash_manifest(name: str, folders: Sequence[Path]) -> str | None:
    """Hash an expert's manifest below the given config folders; null if there is none."""
    try:
        return sha256_file(find_manifest(name, [folder / "experts" for folder in folders]))
    except ConfigError:
        return None


def load_expert(
    name: str,
    *,
    folders: Sequence[Path],
    config: Settings,
    bundled: Collection[str] | None = None,
    told: Sequence[Settings] = (),
) -> Settings:
    """Return an expert's settings, checked and complete.

    ``bundled`` names user files that may be absent, because a bundle has their hashes. ``told`` are
    the configurations of command lines, this run's last. In the result, ``preset`` is that of the
    settings, and ``setting_origins`` says where the training settings come from.

    Raises:
        ConfigError: the manifest, or an override of it, is wrong; names file, key, value and fix.
    """
    path, schema = find_manifest(name, folders), read_schema("expert")
    manifest = read_yaml(path)
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path}: contains no settings; see config/experts/ for examples")
    demo = manifest.get("demo", {}) if config["preset"] == "demo" else {}
    # First without overrides, so that a fault in the file is reported with its line.
    raise_faults(_find_faults_of_file(path, manifest, demo))
    faults = [*_wrong_origins(manifest, path)]
    # It is not a setting itself.
    manifest.pop("demo", None)
    merged = lay_over(manifest, demo)
    own = config["experts"].get(name) or {}
    if "demo" in own:
        raise ConfigError(
            f"config: experts.{name}.demo has no effect; move its keys to experts.{name} itself"
        )
    if isinstance(own.get("sources"), dict):
        own = {**own, "sources": _named_sources(name, merged["sources"], own["sources"])}
    overlays = {"training": config["training"]}, own
    last = [training_overrides(part, name) for part in told]
    for layer in (*overlays, *last):
        merged = lay_over(merged, layer)
    where = f"{path} with {'its demo block and ' if demo else ''}overrides"
    check(merged, schema, where=where)
    faults += (f"{where}: {fault}" for fault in find_idle_keys(merged))
    result: Settings = with_defaults(merged, schema)
    fields = result["evaluation"]["fields"]
    # A null removes what an earlier layer sets.
    result["evaluation"]["fields"] = {key: name for key, name in fields.items() if name is not None}
    for source in result["sources"]:
        # By kind: git commits are scanned, other sources only on request.
        if source["scan_secrets"] is None:
            source["scan_secrets"] = source_kinds()[source["kind"]].scan_secrets
    found = [*find_contradictions(result, bundled=bundled)]
    # A bundle's overrides cannot be removed here.
    for layer in last[-1:]:
        found += find_idle_overrides(layer["training"], result["training"])
    raise_faults([*faults, *(f"{where}: {fault}" for fault in found)])
    layers = {"manifest": [manifest], "overlay": [demo, *overlays], "command line": last}
    origins = _list_origins(layers, merged["training"])
    return {**result, "preset": "demo" if demo else "full", "setting_origins": origins}


def _list_origins(layers: dict[str, list[Settings]], training: Settings) -> dict[str, str]:
    """Return where each training setting comes from: the last layer to name it wins."""
    named = ((o, one.get("training") or ()) for o, parts in layers.items() for one in parts)
    origins = {key: origin for origin, keys in named for key in keys}
    return {key: origin for key, origin in origins.items() if key in training}


def _find_faults_of_file(path: Path, manifest: Settings, demo: Any) -> Iterator[str]:
    schema, places = read_schema("expert"), []
    for keys, text in find_faults(manifest, schema):
        places.append(keys)
        yield f"{at_line(path, keys)}: {text}"
    if isinstance(demo, dict) and demo:
        for keys, text in find_faults(merge_settings(manifest, demo), schema):
            if keys not in places:
                yield f"{at_line(path, ['demo', *keys])}: {text}"


def training_overrides(told: Settings, expert: str) -> Settings:
    """Extract an expert's training settings from the command line's configuration."""

    def part(of: Settings, key: str) -> Settings:
        # Snakemake reads a null on the command line as text.
        return found if isinstance(found := of.get(key), dict) else {}

    schema, layers = read_schema("expert"), (told, part(part(told, "experts"), expert))
    parts = ({"training": part(layer, "training")} for layer in layers)
    return lay_over(*(convert_texts(part, schema, schema) for part in parts))


def _named_sources(expert: str, sources: list[Settings], changes: Settings) -> list[Settings]:
    """Return the sources with overrides by name; ConfigError if there is no such source."""
    names, faults = [source["name"] for source in sources], []
    for name, change in changes.items():
        place = f"config: experts.{expert}.sources.{name}"
        if name not in names:
            hint = suggest_name(name, names, f"its sources are {', '.join(names)}")
            faults.append(f"{place}: the expert has no such source; {hint}")
        elif not isinstance(change, dict):
            faults.append(f"{place} is {change!r}; set keys and values, e.g. {{path: a.jsonl}}")
    raise_faults(faults)
    return [merge_settings(source, changes.get(source["name"], {})) for source in sources]


def _wrong_origins(manifest: Settings, path: Path) -> Iterator[str]:
    """Yield a line for each origin of a key that the manifest does not set."""
    known = dict(_keys({key: item for key, item in manifest.items() if key != "origins"}))
    for key in manifest.get("origins", {}):
        if key not in known:
            hint = suggest_name(key, known, "set it, or remove its origin")
            place = at_line(path, ["origins", key])
            yield f"{place}: origins names {key!r}, which is not set here; {hint}"


def describe_origins(path: Path) -> str:
    """Format the origins that a manifest states; empty if there are none."""
    manifest = read_yaml(path)
    values = dict(_keys(manifest))
    lines = []
    for key, origin in manifest.get("origins", {}).items():
        words = f"{key} {values.get(key)}: {ORIGINS[origin['from']]}"
        words += f"; {origin['why']}" if origin.get("why") else ""
        lines.append(textwrap.fill(words, 98, subsequent_indent="    ", break_on_hyphens=False))
    return textwrap.indent("\n".join(lines), "  ")


def _keys(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    # sources: [{name: mine, path: a}] -> sources, sources.mine, sources.mine.name, …
    named = {}
    if isinstance(value, dict):
        named = value
    elif isinstance(value, list):
        named = {str(v["name"]): v for v in value if isinstance(v, dict) and "name" in v}
    for key, item in named.items():
        yield f"{place}{key}", item
        yield from _keys(item, f"{place}{key}.")
