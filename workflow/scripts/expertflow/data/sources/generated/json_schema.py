"""Generate instructions with a JSON Schema and facts, and the matching JSON object."""

import json
from random import Random
from typing import Any

from expertflow.data.sources.generated.generator import (
    CITIES,
    FAMILY_NAMES,
    GIVEN_NAMES,
    Record,
    build_generator,
)

_ASK = ("Describe", "Write", "Make", "Give me", "Record", "Create")
_YES_NO = (True, False)
# Things with their properties and possible values.
THINGS: dict[str, dict[str, Any]] = {
    "person": {"name": GIVEN_NAMES, "city": CITIES, "age": range(18, 91), "member": _YES_NO},
    "product": {"color": ("red", "blue", "green"), "price": range(5, 96, 5), "sold": _YES_NO},
    "event": {
        **{"city": CITIES, "day": range(1, 29), "kind": ("talk", "fair", "party")},
        "free": _YES_NO,
    },
    "server": {
        **{"owner": FAMILY_NAMES, "state": ("up", "down"), "cores": range(2, 65, 2)},
        "backup": _YES_NO,
    },
    "booking": {
        **{"name": GIVEN_NAMES, "nights": range(1, 15), "room": ("single", "double")},
        "paid": _YES_NO,
    },
    "ticket": {"owner": FAMILY_NAMES, "level": ("low", "normal", "high"), "hours": range(1, 41)},
    "pet": {
        **{"name": GIVEN_NAMES, "kind": ("cat", "dog", "bird"), "age": range(1, 21)},
        "chip": _YES_NO,
    },
    "car": {"owner": FAMILY_NAMES, "fuel": ("petrol", "diesel", "power"), "doors": range(2, 6)},
    "book": {
        **{"owner": FAMILY_NAMES, "pages": range(50, 501, 10), "form": ("novel", "poem")},
        "lent": _YES_NO,
    },
    "flight": {"city": CITIES, "gate": range(1, 41), "class": ("first", "business", "economy")},
}


def make_record(rng: Random) -> Record:
    thing = rng.choice(list(THINGS))
    names = [name for name in THINGS[thing] if rng.random() < 0.8]
    known = {name: THINGS[thing][name] for name in (names if len(names) > 1 else THINGS[thing])}
    value = {name: rng.choice(values) for name, values in known.items()}
    properties = {name: _schema(values) for name, values in known.items()}
    if rng.random() < 0.3:
        value["tags"] = rng.sample(("new", "old", "rare", "top", "test"), rng.randint(1, 2))
        properties["tags"] = {"type": "array", "items": {"type": "string"}}
    facts = ", ".join(f"{name} {_said(item)}" for name, item in value.items())
    start = f"{rng.choice(_ASK)} a {thing}"
    instruction = rng.choice(
        (f"{start} with {facts}.", f"{start}: {facts}.", f"A {thing} has {facts}.")
    )
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"instruction": instruction, "schema": _compact(schema), "json": _compact(value)}


def _schema(values: Any) -> dict[str, Any]:
    if isinstance(values, range):
        return {"type": "integer", "minimum": values[0], "maximum": values[-1]}
    if values is _YES_NO:
        return {"type": "boolean"}
    is_open = values in (GIVEN_NAMES, FAMILY_NAMES, CITIES)
    return {"type": "string"} if is_open else {"enum": list(values)}


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " and ".join(value) if isinstance(value, list) else str(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


generate = build_generator(make_record, key="instruction")
