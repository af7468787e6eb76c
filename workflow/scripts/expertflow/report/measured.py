"""A figure or the reason for its absence, and the plain report made from both."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union, get_type_hints

from msgspec import Meta

from expertflow.core.records import Record

NO_REASON = "no reason was recorded"

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class Missing(Record, frozen=True):
    reason: str


# The type checker rejects a null without a reason; the JSON Schema shows what is written.
if TYPE_CHECKING:
    Measured = Union[T, Missing]  # noqa: UP007 (an alias with a type variable)
else:
    Measured = Optional[T]  # noqa: UP045


def or_missing(value: T | None, reason: str) -> Measured[T]:
    return Missing(reason) if value is None else value


def explain(record: Record, reasons: Mapping[str, str], default: str | None = None) -> Any:
    """Return another record's fields, its nulls replaced by their reasons where there are any."""
    found = {name: getattr(record, name) for name in record.__struct_fields__}
    return {
        name: Missing(why) if value is None and (why := reasons.get(name, default)) else value
        for name, value in found.items()
    }


def doc(text: str, *, of: str | None = None) -> Meta:
    """Describe a key of the report; ``of`` is its name in the source record.

    A key may omit the source's ``n_`` or ``predicted_`` without naming ``of``.
    """
    return Meta(description=text, extra={"of": of} if of else None)


@cache
def _source_names(section: type[Record]) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        extras = [meta.extra for meta in getattr(hint, "__metadata__", ()) if meta.extra]
        derived = (name, f"n_{name}", f"predicted_{name}")
        names[name] = (str(extras[0]["of"]),) if extras else derived
    return names


def fill(
    cls: type[R],
    *sources: Record,
    why: Mapping[str, str] = MappingProxyType({}),
    default: str | None = None,
    **given: Any,
) -> R:
    """Build a section; a field not given comes from the first source that has it.

    ``why`` has reasons for nulls by the source's field; ``default`` is the reason for all others.
    """
    for name, names in _source_names(cls).items():
        if name not in given:
            value, field = next(
                (getattr(source, field), field)
                for field in names
                for source in sources
                if field in source.__struct_fields__
            )
            reason = why.get(field, default)
            given[name] = Missing(reason) if value is None and reason is not None else value
    return cls(**given)


def settle(value: Any) -> tuple[Any, dict[str, str]]:
    """Return plain JSON values, null where something is missing, and the reasons by path.

    >>> settle({"cost": {"usd": Missing("no price")}, "steps": (1, 2)})
    ({'cost': {'usd': None}, 'steps': [1, 2]}, {'cost.usd': 'no price'})
    """
    reasons: dict[str, str] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Missing):
            reasons[path] = value.reason
            return None
        if isinstance(value, Record):
            value = {name: getattr(value, name) for name in value.__struct_fields__}
        if isinstance(value, dict):
            return {k: plain(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return value

    return plain(value, ""), reasons


def null_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted path of each null in JSON values, in order.

    >>> list(null_paths({"a": {"b": None}, "c": [1, None]}))
    ['a.b', 'c[1]']
    """
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from null_paths(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from null_paths(item, f"{path}[{index}]")
