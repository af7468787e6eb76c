"""Make instructions with a JSON Schema and facts, and the JSON object that states those facts."""

import json
from random import Random
from typing import Any

from msgspec import Struct

from expertflow.data.sources.generated.words import CITIES, FAMILY_NAMES, GIVEN_NAMES
from expertflow.data.sources.generated.writing import Record, build_generator

_ASK = ("Describe", "Write", "Make", "Give me", "Record", "Create")


class Field(Struct, frozen=True, kw_only=True):
    """A property: its name, its schema, and the values it can take."""

    name: str
    schema: dict[str, Any]
    values: tuple[Any, ...]


def _words(name: str, *values: str) -> Field:
    return Field(name=name, schema={"enum": list(values)}, values=values)


def _texts(name: str, values: tuple[str, ...]) -> Field:
    return Field(name=name, schema={"type": "string"}, values=values)


def _numbers(name: str, low: int, high: int, step: int = 1) -> Field:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Field(name=name, schema=schema, values=tuple(range(low, high + 1, step)))


def _flags(name: str) -> Field:
    return Field(name=name, schema={"type": "boolean"}, values=(True, False))


_NAME, _CITY = _texts("name", GIVEN_NAMES), _texts("city", CITIES)
_OWNER = _texts("owner", FAMILY_NAMES)
THINGS: dict[str, tuple[Field, ...]] = {
    "person": (_NAME, _CITY, _numbers("age", 18, 90), _flags("member")),
    "product": (
        _words("color", "red", "blue", "green"),
        _numbers("price", 5, 95, 5),
        _flags("sold"),
    ),
    "event": (
        _CITY,
        _numbers("day", 1, 28),
        _words("kind", "talk", "fair", "party"),
        _flags("free"),
    ),
    "server": (
        _OWNER,
        _words("state", "up", "down"),
        _numbers("cores", 2, 64, 2),
        _flags("backup"),
    ),
    "booking": (
        _NAME,
        _numbers("nights", 1, 14),
        _words("room", "single", "double"),
        _flags("paid"),
    ),
    "ticket": (_OWNER, _words("level", "low", "normal", "high"), _numbers("hours", 1, 40)),
    "pet": (_NAME, _words("kind", "cat", "dog", "bird"), _numbers("age", 1, 20), _flags("chip")),
    "car": (_OWNER, _words("fuel", "petrol", "diesel", "power"), _numbers("doors", 2, 5)),
    "book": (
        _OWNER,
        _numbers("pages", 50, 500, 10),
        _words("form", "novel", "poem"),
        _flags("lent"),
    ),
    "flight": (_CITY, _numbers("gate", 1, 40), _words("class", "first", "business", "economy")),
}


def make_record(rng: Random) -> Record:
    """State facts about one thing, as text and as JSON, in the order of its schema."""
    thing = rng.choice(list(THINGS))
    fields = [field for field in THINGS[thing] if rng.random() < 0.8]
    fields = fields if len(fields) > 1 else list(THINGS[thing])
    value = {field.name: rng.choice(field.values) for field in fields}
    if rng.random() < 0.3:
        tags = rng.sample(("new", "old", "rare", "top", "test"), rng.randint(1, 2))
        value, fields = value | {"tags": tags}, [*fields, _TAGS]
    facts = ", ".join(f"{name} {_said(item)}" for name, item in value.items())
    start = f"{rng.choice(_ASK)} a {thing}"
    instruction = rng.choice(
        (f"{start} with {facts}.", f"{start}: {facts}.", f"A {thing} has {facts}.")
    )
    schema = {
        "type": "object",
        "properties": {field.name: field.schema for field in fields},
        "required": [field.name for field in fields],
        "additionalProperties": False,
    }
    return {"instruction": instruction, "schema": _compact(schema), "json": _compact(value)}


_TAGS = Field(name="tags", schema={"type": "array", "items": {"type": "string"}}, values=())


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " and ".join(value) if isinstance(value, list) else str(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


generate = build_generator(make_record, key="instruction")
