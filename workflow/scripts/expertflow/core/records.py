"""Turn frozen dataclasses into JSON and back, strictly.

A record is what one stage tells the next. It is read back exactly: an unknown key, a missing key or
a value of the wrong type is an error that names the file and the key, never a silent default.
"""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from expertflow.core.errors import DataError
from expertflow.core.files import write_text

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Convert a record, or a container of records, to plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def write_record(path: Path, record: Any) -> None:
    """Write a record as indented JSON, whole or not at all."""
    text = json.dumps(to_json(record), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_record(cls: type[T], path: Path) -> T:
    """Read the record that an earlier stage wrote.

    Raises:
        DataError: the file is missing, is no JSON, or does not have exactly the fields of ``cls``.
    """
    record: T = from_json(cls, _read(path), where=str(path))
    return record


def read_part(cls: type[T], path: Path, key: str) -> T:
    """Read one key of a record, without knowing the rest of it.

    Raises:
        DataError: the record is missing, is no JSON, does not have the key, or not of this form.
    """
    record = _read(path)
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{path}: key {key!r} is missing; run the stage that writes it")
    part: T = from_json(cls, record[key], where=f"{path}.{key}")
    return part


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: the record is missing; run the stage that writes it") from error
    except ValueError as error:
        raise DataError(f"{path}: not a JSON record ({error}); delete it and run again") from error


def from_json(cls: Any, value: Any, *, where: str = "value") -> Any:
    """Build ``cls`` from JSON values, checking every key and type on the way.

    >>> from_json(tuple[int, ...], [1, 2])
    (1, 2)
    """
    if cls is Any:
        return value
    if dataclasses.is_dataclass(cls):
        return _dataclass_from_json(cls, value, where)
    origin, arguments = get_origin(cls), get_args(cls)
    if origin in (Union, types.UnionType):
        return _union_from_json(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            raise DataError(f"{where}: {value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _tuple_from_json(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {k: from_json(arguments[1], v, where=f"{where}.{k}") for k, v in value.items()}
    return _scalar_from_json(cls, value, where)


def _dataclass_from_json(cls: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := sorted(set(value) - set(fields)):
        raise DataError(f"{where}: unknown key {unknown[0]!r} for {cls.__name__}")
    for name, field in fields.items():
        optional = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if name not in value and not optional:
            raise DataError(f"{where}: key {name!r} of {cls.__name__} is missing")
    return cls(**{k: from_json(hints[k], v, where=f"{where}.{k}") for k, v in value.items()})


def _union_from_json(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    candidates = [a for a in arguments if a is not type(None)]
    errors = []
    for candidate in candidates:
        try:
            return from_json(candidate, value, where=where)
        except DataError as error:
            errors.append(error)
    raise errors[0]


def _tuple_from_json(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list | tuple), where, "a list", value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds = [arguments[0]] * len(value)
    else:
        kinds = list(arguments)
        _expect(len(value) == len(kinds), where, f"{len(kinds)} items", value)
    return tuple(
        from_json(kind, item, where=f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _scalar_from_json(cls: Any, value: Any, where: str) -> Any:
    if cls is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    right = isinstance(value, cls) and not (cls in (int, float) and isinstance(value, bool))
    _expect(right, where, cls.__name__, value)
    return value


def _expect(condition: bool, where: str, wanted: str, value: Any) -> None:
    if not condition:
        raise DataError(f"{where}: expected {wanted}, found {value!r:.80}")
