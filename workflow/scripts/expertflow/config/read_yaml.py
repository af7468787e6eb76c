"""Read settings from YAML or JSON; a fault is one line with the file and its line number."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from expertflow.core.errors import ConfigError, single_line
from expertflow.core.strict_json import refuse_repeats

SUFFIXES = (".yaml", ".yml", ".json")
# A mapping of settings as read from its file.
Settings = dict[str, Any]
# YAML 1.1 reads 3e-6 as a string: it needs a dot and a signed exponent. A commit id such as 1234e56
# has neither, and stays text.
FLOAT = re.compile(r"^[-+]?(\d*\.\d+[eE][-+]?\d+|\d+\.?[eE][-+]\d+)$")
# Values of a file with all its aliases expanded; ours have a few hundred.
MAX_VALUES = 100_000
# libyaml's messages, and what they mean to the author of the file.
WORDS = {
    "mapping values are not allowed": "a ': ' inside a text; quote the text",
    "could not find expected ':'": "a key without ':'; add it",
    "found a tab character": "a tab; indent with spaces",
    "cannot start any token": "a tab or a sign that starts no value; indent with spaces, or quote",
    "did not find expected key": "a line that is indented differently from its neighbors",
    "did not find expected ',' or": "a '[' or '{' that is not closed",
    "while scanning a quoted scalar": "a quote that is not closed",
    "found undefined alias": "an alias (*name) without its anchor (&name)",
}


# libyaml, where available, reads ten times as fast as Python.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses repeated keys, where YAML takes the last; dates and times stay text."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            fault = None
            if isinstance(key, yaml.CollectionNode):
                fault = "a '{' or '[' where a key should be; quote the text"
            elif key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                fault = f"key {key.value!r} appears twice; remove one"
            if fault is not None:
                raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_number_by(read: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    # YAML 1.1 reads 46:47 as 2807.
    return lambda loader, node: node.value if ":" in node.value else read(loader, node)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
for _kind in ("int", "float"):
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Loader.add_constructor(_tag, _read_number_by(_Loader.yaml_constructors[_tag]))


def read_yaml(path: Path) -> Any:
    """Read a YAML or JSON file with YAML 1.2 scalars; ConfigError names file, line and fix."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            value = json.loads(text, object_pairs_hook=refuse_repeats)
        else:
            value = yaml.load(text, _Loader)
    except OSError as error:
        what = "its permissions" if isinstance(error, PermissionError) else "the path"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); correct {what}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}; correct the syntax") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_fault(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {single_line(error)}; correct it") from error
    check_values(value, path)
    return value


def check_values(value: Any, path: Path) -> None:
    """Refuse non-finite numbers and too many values; ConfigError names the file and line."""
    try:
        for i, (keys, item) in enumerate(_values(value, ())):
            # Ten aliases of ten aliases of … are a few lines that fill the memory.
            if i > MAX_VALUES:
                many = f"more than {MAX_VALUES:,} values with its aliases expanded"
                raise ConfigError(f"{path}: {many}; use fewer")
            if isinstance(item, float) and not math.isfinite(item):
                place = at_line(path, keys)
                raise ConfigError(f"{place}: {keys[-1]} is {item}; use a finite number, or null")
    except RecursionError as error:
        raise ConfigError(f"{path}: an alias that contains itself; write the values out") from error


def at_line(path: Path, keys: Sequence[str | int]) -> str:
    """Return the file with the line of a key, or of the nearest object; without it if unknown."""
    try:
        # Read again, only for errors: the loader keeps no line numbers.
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return str(path)
    line = None
    for key in keys:
        found = list(_below(node, key))
        if not found:
            break
        mark, node = found[0]
        line = mark.line + 1
    return str(path) if line is None else f"{path}:{line}"


def _below(node: Any, key: str | int) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                yield name.start_mark, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        yield node.value[key].start_mark, node.value[key]


def _values(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield keys, value
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from _values(item, (*keys, key))


def _fault(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {single_line(error)}; correct the syntax"
    mark = error.problem_mark or error.context_mark
    message = f"{error.context or ''} {error.problem or ''}".strip()
    words = next((words for found, words in WORDS.items() if found in message), message)
    return f":{mark.line + 1 if mark else '?'}: {words}"


def suggest_name(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """Ask whether the most similar known name was meant; if there is none, return ``otherwise``.

    >>> suggest_name("learning_rat", ["seed", "learning_rate"]), suggest_name("x", ["b", "a"])
    ("did you mean 'learning_rate'?", 'known: a, b')
    """
    names = sorted(known)
    # YAML reads the key 1 as a number, and the key "on" as a boolean. The ratio is at least 0.6.
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return otherwise or f"known: {', '.join(names)}"
