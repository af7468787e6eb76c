"""A figure or the reason for its absence, and the plain report made from both."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Optional, TypeGuard, TypeVar, Union, get_type_hints

from msgspec import Meta, Struct
from msgspec.structs import replace

from expertflow.core.records import Record

NO_REASON = "no reason was recorded"
NOT_MEASURED = "not measured"

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R", bound=Struct)


class Missing(Record, frozen=True):
    """Why there is no figure. It is falsy, so a figure is tested for truth, never for None.

    If zero is a value, use ``is_measured``.
    """

    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return NOT_MEASURED


# The type checker rejects a null without a reason; the JSON Schema shows what is written.
if TYPE_CHECKING:
    Measured = Union[T, Missing]  # noqa: UP007 (an alias with a type variable)
else:
    Measured = Optional[T]  # noqa: UP045


def or_missing(value: T | None, reason: str) -> Measured[T]:
    return Missing(reason) if value is None else value


def is_measured(value: Measured[T] | None) -> TypeGuard[T]:
    return value is not None and not isinstance(value, Missing)


def convert_value(value: Measured[T], convert: Callable[[T], V]) -> V | Missing:
    return value if isinstance(value, Missing) else convert(value)


def doc(text: str, *, of: str | None = None) -> Meta:
    """Describe a key of the report; ``of`` is its name in the source record.

    A key may omit the source's ``n_`` or ``predicted_`` without naming ``of``.
    """
    return Meta(description=text, extra={"of": of} if of else None)


@cache
def _source_names(section: type[Struct]) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        # Annotated[int, doc("…", of="n_steps")] -> that name alone; else the prefixes are tried.
        extras = [meta.extra for meta in getattr(hint, "__metadata__", ()) if meta.extra]
        derived = (name, f"n_{name}", f"predicted_{name}")
        names[name] = (str(extras[0]["of"]),) if extras else derived
    return names


def fill(
    cls: type[R],
    *sources: Struct,
    why: Mapping[str, str] = MappingProxyType({}),
    default: str | None = None,
    **given: Any,
) -> R:
    """Build a section; a field not given comes from the first source that has it.

    ``why`` has reasons for nulls by the source's field; ``default`` is the reason for all others.
    """
    for name, names in _source_names(cls).items():
        if name not in given:
            # No default: a key that no source has is a mistake in the declaration, and fails here.
            value, field = next(
                (getattr(source, field), field)
                for field in names
                for source in sources
                if field in source.__struct_fields__
            )
            # A null without a reason stays one; check_report rejects it unless it is intentional.
            reason = why.get(field, default)
            given[name] = Missing(reason) if value is None and reason is not None else value
    return cls(**given)


def explain(record: R, reasons: Mapping[str, str], default: str | None = None) -> R:
    """Return a record with its nulls replaced by their reasons, if any."""
    return fill(type(record), record, why=reasons, default=default)


def to_plain(value: Any) -> tuple[Any, dict[str, str | None]]:
    """Return JSON values, and the reason for each null by its path; None if it has none.

    >>> to_plain({"cost": {"usd": Missing("no price")}, "steps": (1, None)})
    ({'cost': {'usd': None}, 'steps': [1, None]}, {'cost.usd': 'no price', 'steps[1]': None})
    """
    nulls: dict[str, str | None] = {}

    def plain(value: Any, path: str) -> Any:
        if value is None or isinstance(value, Missing):
            nulls[path] = value.reason if value is not None else None
            return None
        if isinstance(value, Struct):
            # Keys as written: Bottleneck.class_ is "class".
            names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            value = {key: getattr(value, name) for key, name in names}
        if isinstance(value, dict):
            return {k: plain(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return value

    return plain(value, ""), nulls


def restore(value: Any, reasons: Mapping[str, str], path: str = "") -> Any:
    """Return a decoded section with reasons in place of its nulls: the inverse of ``to_plain``."""
    if value is None:
        # A null without a reason was intentional, or its own record has the reason.
        return Missing(reasons[path]) if path in reasons else None
    if isinstance(value, Struct):
        names = value.__struct_fields__
        prefix = f"{path}." if path else ""
        return replace(
            value, **{n: restore(getattr(value, n), reasons, f"{prefix}{n}") for n in names}
        )
    if isinstance(value, dict):
        return {key: restore(item, reasons, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(restore(item, reasons, f"{path}[{i}]") for i, item in enumerate(value))
    return value
