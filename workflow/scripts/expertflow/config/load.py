"""Read config.yaml and the manifests, merge presets and overrides, and refuse contradictions.

Later wins: schema defaults < manifest < its demo block (demo preset) < ``training`` of the
configuration < ``experts.{name}`` of the configuration.
"""

import difflib
import json
import re
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from expertflow.config import validate
from expertflow.config.evaluation_tasks import check_task
from expertflow.config.idle_keys import refuse_idle_keys
from expertflow.core.errors import ConfigError
from expertflow.core.records import Record, from_json
from expertflow.core.settings import json_schema, without_auto
from expertflow.data.checks.registry import build_checks
from expertflow.data.settings import FieldCheck
from expertflow.data.shapes import template_fields
from expertflow.plan.contradictions import check_settings
from expertflow.plan.settings import TrainingSection

SUFFIXES = (".yaml", ".yml", ".json")
# YAML 1.1 reads 3e-6 as a string: it wants a dot and a signed exponent. Snakemake's --config reads
# true as a string, too.
# A commit id such as 1234e56 has neither, and stays a text.
FLOAT = re.compile(r"[-+]?(\d*\.\d+[eE][-+]?\d+|\d+\.?[eE][-+]\d+)")
INTEGER = re.compile(r"[+-]?\d+")
DECIMAL = re.compile(r"[+-]?\d*\.\d+")
WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


# libyaml reads ten times as fast as Python, where it is there.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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


def read_yaml(path: Path) -> Any:
    """Read a YAML or JSON file, with its scalars mended."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.load(text, YAML_LOADER)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); create it") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}; correct the syntax") from error
    return scalars(value, words={})


def scalars(value: Any, *, words: dict[str, bool | None]) -> Any:
    """Give texts like ``3e-6``, and ``words``, the type they mean; dates become texts."""
    if isinstance(value, dict):
        return {key: scalars(item, words=words) for key, item in value.items()}
    if isinstance(value, list):
        return [scalars(item, words=words) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str) and FLOAT.fullmatch(value):
        return float(value)
    return words.get(value, value) if isinstance(value, str) else value


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
) -> dict[str, Any]:
    """Give an expert's settings for the preset at hand, checked and complete.

    ``bundled`` names files of the user that may be absent, as a bundle tells what they hold.

    Raises:
        ConfigError: the manifest, or an override of it, is wrong; names file, key, value and fix.
    """
    path = find_manifest(name, directories)
    manifest = read_yaml(path)
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path}: holds no settings; see config/experts/ for examples")
    _check_durations(manifest, where=str(path))
    validate.check(manifest, schemas.expert, where=str(path))
    demo = manifest.pop("demo", {})
    merged = merge(manifest, demo) if config["preset"] == "demo" else manifest
    merged = merge(merged, {"training": config["training"]})
    own = config["experts"].get(name) or {}
    if "demo" in own:
        raise ConfigError(
            f"config: experts.{name}.demo has no effect; give its keys to experts.{name} itself"
        )
    merged = merge(merged, own)
    where = f"{path} with preset {config['preset']} and overrides"
    _check_durations(merged, where=where)
    validate.check(merged, schemas.expert, where=where)
    refuse_idle_keys(merged, where=where)
    result: dict[str, Any] = validate.with_defaults(merged, schemas.expert)
    check_contradictions(result, where=where, bundled=bundled)
    return result


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
