"""Declare a setting once, as a struct field; derive its schema, flag and effects.

    learning_rate: Annotated[float, Setting("Peak learning rate.", WEIGHTS, gt=0)] = 2e-4

A nullable field is written ``auto`` in a manifest if the setting says so, else null. Code that
needs a setting's name as text asks the field: ``name_of(Training.learning_rate)``.
"""

from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec.structs import fields, replace

AUTO = "auto"
# What a setting affects: the weights, the time per step, the number of steps, the shape of the
# learning-rate schedule, the number of processes, or only what is logged.
Affected = Literal["weights", "speed", "length", "schedule", "processes", "log"]
WEIGHTS: tuple[Affected, ...] = ("weights",)
SPEED: tuple[Affected, ...] = ("speed",)
BOTH: tuple[Affected, ...] = ("weights", "speed")
LENGTH: tuple[Affected, ...] = ("length",)
SCHEDULE: tuple[Affected, ...] = ("schedule",)
LOG: tuple[Affected, ...] = ("weights", "log")
PROCESSES: tuple[Affected, ...] = ("speed", "processes")
NOTHING: tuple[Affected, ...] = ()
# JSON Schema's names of msgspec's bounds.
BOUNDS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum",
}  # fmt: skip
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
JsonSchema = dict[str, Any]

Spec = TypeVar("Spec", bound=msgspec.Struct)


class SettingInfo(NamedTuple):
    """A declared setting. ``kind`` is its type without null, ``schema`` its value's schema.

    ``plain_schema`` excludes null and ``auto``, as for a flag. ``neutral`` is the value in a timing
    run, if the setting does not affect time.
    """

    name: str
    kind: Any
    schema: JsonSchema
    plain_schema: JsonSchema
    text: str
    affects: tuple[Affected, ...]
    neutral: Any
    auto: bool
    by_hand: bool
    reported: bool


def Setting(  # noqa: N802 (reads as the name of what it declares)
    text: str,
    affects: tuple[Affected, ...],
    *,
    auto: bool = False,
    by_hand: bool = True,
    reported: bool = False,
    neutral: Any = ...,
    const: Any = None,
    or_text: str | None = None,
    **bounds: float,
) -> msgspec.Meta:
    """Declare a setting; ``bounds`` are ge, gt, le, lt and min_length, as in msgspec.

    Bounds go into the schema, since msgspec allows none on a nullable value. ``auto``: null is
    written ``auto``. ``by_hand``: the trainer has a flag for it. ``neutral``: replaces the default
    in a timing run. ``const``: the only accepted value. ``or_text``: a text that a manifest may
    use instead of a list with only that item.
    """
    extra = {
        "affects": affects, "auto": auto, "by_hand": by_hand, "reported": reported,
        "neutral": neutral, "const": const, "or_text": or_text, "bounds": bounds,
    }  # fmt: skip
    return msgspec.Meta(description=text, extra=extra)


# Declares a setting that is a key of ``training_parameters`` in report.json.
Reported = partial(Setting, reported=True)


def name_of(field: Any) -> str:
    """Return the name of a field, given as an attribute of its struct's class."""
    # On a struct's class, a field is a descriptor that knows its name.
    return str(field.__name__)


@cache
def list_settings(cls: type[msgspec.Struct]) -> tuple[SettingInfo, ...]:
    """List the declared settings of a struct in order, without its other fields."""
    found = []
    hints = get_type_hints(cls, include_extras=True)
    defaults = {field.encode_name: field for field in fields(cls)}
    for name, hint in hints.items():
        if (meta := _meta(hint)) is None:
            continue
        field, extra = defaults[name], meta.extra or {}
        default = field.default
        kind, nullable = _without_null(get_args(hint)[0])
        neutral = extra["neutral"]
        setting = SettingInfo(
            name=name,
            kind=kind,
            schema=_schema(kind, meta, nullable=nullable, default=default),
            plain_schema=_schema(kind, meta, nullable=False, default=msgspec.NODEFAULT),
            text=meta.description or "",
            neutral=default if neutral is ... else neutral,
            **{name: extra[name] for name in ("affects", "auto", "by_hand", "reported")},
        )
        found.append(setting)
    return tuple(found)


def json_schema(cls: type[msgspec.Struct]) -> JsonSchema:
    found = {setting.name: setting.schema for setting in list_settings(cls)}
    return {"type": "object", "additionalProperties": False, "properties": found}


def without_auto(value: Any) -> Any:
    """Replace ``auto`` by null throughout an object."""
    if isinstance(value, dict):
        return {key: without_auto(item) for key, item in value.items()}
    return None if value == AUTO else value


def neutralize(spec: Spec) -> Spec:
    """Return the settings with those that do not affect a step's time at their neutral values."""
    settings = list_settings(type(spec))
    return replace(spec, **{s.name: s.neutral for s in settings if "speed" not in s.affects})


def _meta(hint: Any) -> msgspec.Meta | None:
    parts = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((part for part in parts if isinstance(part, msgspec.Meta) and part.extra), None)


def _without_null(kind: Any) -> tuple[Any, bool]:
    # float | None -> float, True
    if get_origin(kind) not in (Union, UnionType):
        return kind, False
    rest = [part for part in get_args(kind) if part is not NoneType]
    return rest[0], len(rest) < len(get_args(kind))


def _schema(kind: Any, meta: msgspec.Meta, *, nullable: bool, default: Any) -> JsonSchema:
    extra = meta.extra or {}
    own = _of_kind(kind)
    lengths = "minItems" if own.get("type") == "array" else "minLength"
    for name, bound in extra["bounds"].items():
        # In a list, numeric bounds apply to each item.
        place = own["items"] if name in BOUNDS and "items" in own else own
        place[BOUNDS.get(name, lengths)] = bound
    if extra["const"] is not None:
        own["const"] = extra["const"]
    if extra["or_text"] is not None:
        own = {"oneOf": [own, {"const": extra["or_text"]}]}
    if nullable and extra["auto"]:
        listed = own.get("enum")
        own = {"enum": [AUTO, *listed]} if listed else {"oneOf": [own, {"const": AUTO}]}
    elif nullable and "enum" in own:
        own["enum"] = [*own["enum"], None]
    elif nullable and own["type"] != "object":
        own["type"] = [own["type"], "null"]
    shown = AUTO if nullable and extra["auto"] else default
    if shown is not msgspec.NODEFAULT:
        plain = list(shown) if isinstance(shown, tuple) else shown
        own["default"] = {} if isinstance(shown, msgspec.Struct) else plain
    return own | {"description": meta.description}


def _of_kind(kind: Any) -> JsonSchema:
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _of_kind(get_args(kind)[0])}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return json_schema(kind)
    return {"type": TYPES[kind]}
