"""Generate instructions with a JSON Schema and facts, and the matching JSON object."""

import json
from functools import partial
from random import Random
from typing import Any

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator

_ASK = ("Describe", "Write", "Make", "Give me", "Fields of", "Create")
_THINGS = """
person: name = given names; city = cities; age = 18 to 90 by 1; member = yes or no
product: color = red, blue, green; price = 5 to 95 by 5; sold = yes or no
event: city = cities; day = 1 to 28 by 1; kind = talk, fair, party; free = yes or no
server: owner = family names; state = up, down; cores = 2 to 64 by 2; backup = yes or no
booking: name = given names; nights = 1 to 14 by 1; room = single, double; paid = yes or no
ticket: owner = family names; level = low, normal, high; hours = 1 to 40 by 1
pet: name = given names; kind = cat, dog, bird; age = 1 to 20 by 1; chip = yes or no
car: owner = family names; fuel = petrol, diesel, power; doors = 2 to 5 by 1
book: owner = family names; pages = 50 to 500 by 10; form = novel, poem; lent = yes or no
flight: city = cities; gate = 1 to 40 by 1; class = first, business, economy
"""
THINGS = {
    thing: {each.name: each.values for each in generator.parse_properties(listed)}
    for thing, _, listed in (line.partition(": ") for line in _THINGS.strip().splitlines())
}


def make_record(rng: Random) -> Fields:
    thing = rng.choice(list(THINGS))
    names = [name for name in THINGS[thing] if rng.random() < 0.8]
    known = {name: THINGS[thing][name] for name in (names if len(names) > 1 else THINGS[thing])}
    value = {name: rng.choice(values) for name, values in known.items()}
    properties = {name: _schema(values) for name, values in known.items()}
    if rng.random() < 0.3:
        value["tags"] = rng.sample(("new", "old", "rare", "top", "test"), rng.randint(1, 2))
        properties["tags"] = {"type": "array", "items": {"type": "string"}}
    facts = ", ".join(f"{name} {_format_fact(item)}" for name, item in value.items())
    named = f"an {thing}" if thing == "event" else f"a {thing}"
    start = f"{rng.choice(_ASK)} {named}"
    instruction = rng.choice(
        (f"{start} with {facts}.", f"{start}: {facts}.", f"{named.capitalize()} has {facts}.")
    )
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"instruction": instruction, "schema": _compact(schema), "json": _compact(value)}


def _schema(values: Any) -> dict[str, object]:
    if isinstance(values, range):
        return {"type": "integer", "minimum": values[0], "maximum": values[-1]}
    if values == (True, False):
        return {"type": "boolean"}
    # Names and cities stay open, as in most schemas.
    is_open = values in (generator.GIVEN_NAMES, generator.FAMILY_NAMES, generator.CITIES)
    return {"type": "string"} if is_open else {"enum": list(values)}


def _format_fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " and ".join(value) if isinstance(value, list) else str(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


generate = partial(generator.generate_records, make_record)
