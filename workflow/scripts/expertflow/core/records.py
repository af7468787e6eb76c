"""Records: typed JSON passed from one stage to the next.

An unknown key, a missing key or a wrong type is an error that names file and key, never a silent
default.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_text, write_text

T = TypeVar("T")
SEAL = "seal"
REPAIR = "run make repair (workflow/scripts/repair_results.py), then run again"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""


def fill_record(cls: type[T], *sources: Any, **given: Any) -> T:
    """Build a record; fields not given come from the first source that has them.

    A field that no source has keeps its default.
    """
    for name in cls.__struct_fields__:  # type: ignore[attr-defined]
        if name not in given and (source := next((s for s in sources if hasattr(s, name)), None)):
            given[name] = getattr(source, name)
    return cls(**given)


def to_json(value: Any) -> Any:
    """Convert a record, or a container of records, to plain JSON values."""
    if isinstance(value, msgspec.Struct):
        return {name: to_json(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def write_record(path: Path, record: Any) -> None:
    """Write a record as indented JSON, atomically; ValueError if a number is NaN or infinite."""
    # With the standard library: msgspec silently writes NaN as null.
    text = json.dumps(to_json(record), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_sealed(path: Path, record: Any) -> None:
    """Write a record that has no sidecar, with its own hash, which every reader checks."""
    write_record(path, seal(to_json(record)))


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Add the hash of all other keys of a JSON object."""
    # As it will be read: keys are strings.
    return {**value, SEAL: _hash_rest(json.loads(json.dumps(value)))}


def unseal(value: Any) -> Any:
    """Return a JSON value without its seal, if it has one; ValueError if that does not match."""
    if not isinstance(value, dict) or SEAL not in value:
        return value
    if value[SEAL] != _hash_rest(value):
        raise ValueError("contents do not match the seal")
    return {key: item for key, item in value.items() if key != SEAL}


def _hash_rest(value: dict[str, Any]) -> str:
    rest = {key: item for key, item in value.items() if key != SEAL}
    return sha256_text(json.dumps(rest, sort_keys=True))


def read_record(cls: type[T], path: Path) -> T:
    """Read a stage's record; DataError unless it is JSON with exactly the fields of ``cls``."""
    return from_json(cls, _read(path), where=str(path), fix=REPAIR)


def read_part(cls: type[T], path: Path, key: str) -> T:
    """Read one key of a record, ignoring the rest; DataError if missing or malformed."""
    record = _read(path)
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{path}: key {key!r} is missing; {REPAIR}")
    return from_json(cls, record[key], where=f"{path}.{key}")


def _read(path: Path) -> Any:
    try:
        return unseal(json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        fix = "run the stage that writes it, or make repair"
        raise DataError(f"{path}: the record is missing; {fix}") from error
    except (IsADirectoryError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON record ({error}); {REPAIR}") from error


def from_json(cls: type[T], value: Any, *, where: str = "value", fix: str = "") -> T:
    """Build ``cls`` from JSON values, checking every key and type; an error ends with ``fix``.

    >>> from_json(tuple[int, ...], [1, 2])
    (1, 2)
    """
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.a[0]`" -> ".a[0]: expected int, got str".
        problem, _, place = str(error).replace("`", "").partition(" - at $")
        what_to_do = f"; {fix}" if fix else ""
        raise DataError(f"{where}{place}: {problem[0].lower()}{problem[1:]}{what_to_do}") from error
