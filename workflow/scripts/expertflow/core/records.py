"""Records: typed JSON passed from one stage to the next.

An unknown key, a missing key or a wrong type is an error that names file and key, never a silent
default.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from expertflow.core.errors import DataError
from expertflow.core.files import write_text

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""


def fill_record(cls: type[T], *sources: Any, **given: Any) -> T:
    """Build a record; a field that is not given is that of the first source that has it.

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
    text = json.dumps(to_json(record), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_record(cls: type[T], path: Path) -> T:
    """Read a stage's record; DataError unless it is JSON with exactly the fields of ``cls``."""
    record: T = from_json(cls, _read(path), where=str(path))
    return record


def read_part(cls: type[T], path: Path, key: str) -> T:
    """Read one key of a record, ignoring the rest; DataError if missing or malformed."""
    record = _read(path)
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{path}: key {key!r} is missing; run the stage that writes it")
    part: T = from_json(cls, record[key], where=f"{path}.{key}")
    return part


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path}: the record is missing; run the stage that writes it") from error
    except ValueError as error:
        raise DataError(f"{path}: not a JSON record ({error}); delete it and run again") from error


def from_json(cls: Any, value: Any, *, where: str = "value") -> Any:
    """Build ``cls`` from JSON values, checking every key and type.

    >>> from_json(tuple[int, ...], [1, 2])
    (1, 2)
    """
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).replace("`", "").partition(" - at $")
        raise DataError(f"{where}{place}: {problem[0].lower()}{problem[1:]}") from error
