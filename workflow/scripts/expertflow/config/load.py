"""Read config.yaml and the manifests, merge presets and overrides, and refuse contradictions.

Later wins: schema defaults < manifest < its demo block (demo preset) < ``training`` of the
configuration < ``experts.{name}`` of the configuration.
"""

import difflib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from expertflow.config import validate
from expertflow.config.evaluation_tasks import check_task
from expertflow.config.idle_keys import refuse_idle_keys
from expertflow.config.read_yaml import at_line, read_yaml, scalars
from expertflow.config.stated import check_stated
from expertflow.core.errors import ConfigError
from expertflow.core.records import Record, from_json
from expertflow.core.settings import json_schema, without_auto
from expertflow.data.checks.registry import build_checks
from expertflow.data.settings import FieldCheck
from expertflow.data.shapes import template_fields
from expertflow.plan.records import Origin
from expertflow.plan.settings import TrainingSection
from expertflow.plan.switches import check_settings

SUFFIXES = (".yaml", ".yml", ".json")
INTEGER = re.compile(r"[+-]?\d+")
DECIMAL = re.compile(r"[+-]?\d*\.\d+")
# Snakemake's --config reads true as a string.
WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


class Schemas(Record, frozen=True, kw_only=True):
    """The JSON Schemas that settings are checked against."""

    config: dict[str, Any]
    expert: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "Schemas":
        """Read the schemas that lie beside the rules; that of training is declared in code."""
        expert = read_yaml(directory / "expert.schema.yaml")
        expert["$defs"]["training"] = json_schema(TrainingSection)
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
    """Give texts that are plain numbers as such: Snakemake leaves them texts inside an object.

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
    validate.check(config, schemas.config, where="config/config.yaml")
    result: dict[str, Any] = validate.with_defaults(config, schemas.config)
    return result


def find_manifest(name: str, directories: list[Path]) -> Path:
    """Find an expert's manifest in the first directory that has it.

    Raises:
        ConfigError: no directory does; names the nearest expert that exists.
    """
    for directory in directories:
        for suffix in SUFFIXES:
            if (path := directory / f"{name}{suffix}").is_file():
                return path
    known = sorted({p.stem for d in directories for p in d.glob("*") if p.suffix in SUFFIXES})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known experts are {', '.join(known)}"
    raise ConfigError(f"no manifest for expert {name!r} (config/experts/{name}.yaml); {hint}")


def load_expert(
    name: str,
    *,
    directories: list[Path],
    config: dict[str, Any],
    schemas: Schemas,
    bundled: Collection[str] = (),
    told: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Give an expert's settings for the preset at hand, checked and complete.

    ``bundled`` names files of the user that may be absent, as a bundle tells what they hold.
    ``told`` is what of the configuration the command line says. Below ``setting_origins`` stands
    where the training settings come from.

    Raises:
        ConfigError: the manifest, or an override of it, is wrong; names file, key, value and fix.
    """
    path = find_manifest(name, directories)
    manifest = read_yaml(path)
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path}: holds no settings; see config/experts/ for examples")
    _check_durations(manifest, where=str(path))
    validate.check(manifest, schemas.expert, where=str(path), at=lambda keys: at_line(path, keys))
    check_stated(manifest, where=str(path))
    demo = manifest.pop("demo", {})
    merged = merge(manifest, demo) if config["preset"] == "demo" else manifest
    merged = merge(merged, {"training": config["training"]})
    own = config["experts"].get(name) or {}
    if "demo" in own:
        raise ConfigError(
            f"config: experts.{name}.demo has no effect; give its keys to experts.{name} itself"
        )
    if isinstance(own.get("sources"), dict):
        own = {**own, "sources": _named_sources(name, merged["sources"], own["sources"], schemas)}
    merged = merge(merged, own)
    where = f"{path} with preset {config['preset']} and overrides"
    _check_durations(merged, where=where)
    validate.check(merged, schemas.expert, where=where)
    refuse_idle_keys(merged, where=where)
    result: dict[str, Any] = validate.with_defaults(merged, schemas.expert)
    check_contradictions(result, where=where, bundled=bundled)
    demos = [demo] if config["preset"] == "demo" else []
    overlays = [layer.get("training") or {} for layer in (*demos, config, own)]
    layers: list[tuple[Origin, Collection[str]]] = [
        ("manifest", manifest.get("training", {})),
        *(("overlay", overlay) for overlay in overlays),
        ("command line", _told_training(name, told or {})),
    ]
    # The last to name a setting wins.
    result["setting_origins"] = {key: origin for origin, keys in layers for key in keys}
    return result


def _told_training(name: str, told: dict[str, Any]) -> set[str]:
    """Name the training settings that the command line gives, for all experts or for this one."""
    own = (told.get("experts") or {}).get(name) or {}
    return {*(told.get("training") or {}), *(own.get("training") or {})}


def _named_sources(
    expert: str, sources: list[dict[str, Any]], changes: dict[str, Any], schemas: Schemas
) -> list[dict[str, Any]]:
    """Return the sources with those changed that are named, numbers read as such.

    Raises:
        ConfigError: no source has this name.
    """
    names = [source["name"] for source in sources]
    known = schemas.expert["$defs"]["source"]["properties"]
    numeric = {key for key, schema in known.items() if _takes_number(schema)}
    for name, change in changes.items():
        place = f"config: experts.{expert}.sources.{name}"
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its sources are {', '.join(names)}"
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


def _takes_number(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", [])
    return bool({"integer", "number"}.intersection([kinds] if isinstance(kinds, str) else kinds))


def _check_durations(manifest: dict[str, Any], *, where: str) -> None:
    """Refuse a duration that YAML made a number of, before the schema does without the reason."""
    claims = manifest.get("claims")
    for claim in claims if isinstance(claims, list) else []:
        duration = claim.get("duration") if isinstance(claim, dict) else None
        if isinstance(duration, int | float):
            raise ConfigError(
                f"{where}: claims.duration is the number {duration}, which is what YAML makes of"
                ' 46:47 and the like; quote it: "46:47"'
            )


def check_contradictions(
    expert: dict[str, Any], *, where: str, bundled: Collection[str] = ()
) -> None:
    """Refuse settings that are fine alone and wrong together."""
    training = from_json(TrainingSection, without_auto(expert["training"]), where=where)
    check_settings(training, name=lambda setting: f"{where}: training.{setting}")
    for source in expert["sources"]:
        if source["scan_secrets"] is None:
            # A repository's history holds what was removed from its files long ago.
            source["scan_secrets"] = source["kind"] == "git"
    names = [source["name"] for source in expert["sources"]]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: two sources are named {repeated[0]!r}; rename one")
    for benchmark in expert["data"]["benchmarks"]:
        _check_template(benchmark["text"], where=f"{where}: benchmark {benchmark['path']}")
        if benchmark["path"] not in bundled and not Path(benchmark["path"]).is_file():
            raise ConfigError(
                f"{where}: data.benchmarks names {benchmark['path']}, which is not there; correct"
                " the path"
            )
    template = expert["data"]["chat_template"]
    known = ("auto", "chatml", *bundled)
    if template not in known and not Path(template).expanduser().is_file():
        raise ConfigError(
            f"{where}: data.chat_template is {template!r}, and no such file is there; use auto,"
            " chatml, or the path of a Jinja file"
        )
    check_task(expert["evaluation"], where)
    task = expert["evaluation"]["task"]
    for source in expert["sources"]:
        for key in ("prompt", "completion", "text"):
            place = f"{where}: source {source['name']}, {key}"
            _check_template(source.get(key) or "", where=place)
        checks = from_json(tuple[FieldCheck, ...], source["checks"], where=where)
        try:
            build_checks(checks, source=source["name"])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if "text" in source and task != "held_out_loss":
            raise ConfigError(
                f"{where}: evaluation.task {task} asks questions and source {source['name']} has"
                " none, only text; use held_out_loss, or prompt and completion"
            )


def _check_template(template: str, *, where: str) -> None:
    try:
        template_fields(template)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
