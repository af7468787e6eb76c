"""Shared by generators: words, patterns to fill, and unique records from one seed."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from expertflow.core.errors import DataError
from expertflow.core.files import write_text
from expertflow.data.records import Fields

# This many repeats in a row mean that a generator's wordings are used up.
MAX_REPEATS = 5000

CITIES = ("Lyon", "Oslo", "Porto", "Turin", "Graz", "Ghent", "Bergen", "Malaga")
COUNTRIES = ("France", "Norway", "Portugal", "Italy", "Austria", "Belgium", "Spain", "Chile")
GIVEN_NAMES = (
    *("Ada", "Ben", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Ines", "Jonas"),
    *("Karin", "Leo", "Maria", "Nils", "Olga", "Pedro", "Rosa", "Simon", "Tara", "Victor"),
)
FAMILY_NAMES = (
    *("Adler", "Berg", "Costa", "Dahl", "Evans", "Fischer", "Garcia", "Hansen", "Ito", "Jensen"),
    *("Keller", "Lopez", "Moreau", "Novak", "Olsen"),
    *("Pereira", "Rossi", "Silva", "Tanaka", "Weber"),
)
ADJECTIVES = (
    *("Amber", "Blue", "Calm", "Distant", "Early", "Frozen", "Golden", "Hidden", "Iron", "Jade"),
    *("Last", "Misty", "Northern", "Open", "Quiet", "Red", "Silent", "Tall", "Urban", "Wild"),
)
NOUNS = (
    *("Arrow", "Bridge", "Castle", "Dream", "Echo", "Forest", "Garden", "Harbor", "Island", "Joy"),
    *("Lantern", "Mirror", "Night", "Ocean", "Path", "River", "Stone", "Tower", "Valley", "Wind"),
)


# Vocabularies by name; a property's values may also be a list, or numbers such as "5 to 20 by 5".
_VOCABULARIES: dict[str, tuple[Any, ...]] = {
    **{"adjectives": ADJECTIVES, "cities": CITIES, "countries": COUNTRIES},
    **{"given names": GIVEN_NAMES, "family names": FAMILY_NAMES, "yes or no": (True, False)},
}


class Property(Struct, frozen=True):
    name: str
    phrases: tuple[str, ...]
    values: tuple[Any, ...] | range

    @property
    def is_number(self) -> bool:
        return isinstance(self.values, range)


def parse_properties(text: str) -> tuple[Property, ...]:
    """Read properties, each ``name = values`` or ``name: phrase, phrase = values``."""
    found = []
    for part in text.strip().replace("\n", ";").split(";"):
        head, _, listed = part.strip().partition(" = ")
        name, _, phrases = head.partition(": ")
        values: tuple[Any, ...] | range = _VOCABULARIES.get(listed) or tuple(listed.split(", "))
        if " to " in listed:
            low, high, step = map(int, listed.replace(" by ", " to ").split(" to "))
            values = range(low, high + 1, step)
        found.append(Property(name, tuple((phrases or name).split(", ")), values))
    return tuple(found)


def fill_pattern(rng: Random, *patterns: str, **words: Any) -> str:
    """Fill all patterns in order and return one; braces hold alternatives or a word's name.

    A trailing bar marks a single alternative.

    >>> fill_pattern(Random(0), "{Show|List} the {key}.", key="age")
    'List the age.'
    """

    def fill(place: re.Match[str]) -> str:
        inside = place[1]
        drawn = tuple(inside.removesuffix("|").split("|")) if "|" in inside else words[inside]
        return str(rng.choice(drawn) if isinstance(drawn, tuple) else drawn)

    # All are filled before one is chosen: data sets of earlier versions depend on the order of
    # draws.
    filled = [re.sub(r"\{(.*?)\}", fill, pattern) for pattern in patterns]
    return filled[0] if len(filled) == 1 else rng.choice(filled)


def generate_records(
    make: Callable[[Random], Fields], *, n_documents: int, seed: int, directory: Path
) -> dict[str, Path]:
    """Write records with a unique first field and an ``id``; DataError if there are too few."""
    rng, repeats = Random(seed), 0
    records: dict[str, Fields] = {}
    while len(records) < n_documents:
        record = make(rng)
        first = next(iter(record.values()))
        if first not in records:
            records[first] = {"id": f"{len(records) + 1:06d}", **record}
            repeats = 0
        elif (repeats := repeats + 1) > MAX_REPEATS:
            raise DataError(
                f"n_documents: {n_documents} is more than this generator can make; "
                f"set it to at most {len(records)}"
            )
    write_records(directory, records.values())
    return {}


def write_records(directory: Path, records: Iterable[Fields]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_text(directory / "records.jsonl", "".join(f"{line}\n" for line in lines))
