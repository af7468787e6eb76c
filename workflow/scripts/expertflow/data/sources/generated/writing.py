"""What every generator shares: unique records, from one seed, written whole."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import write_text

Record = dict[str, Any]
# A generator whose wordings are used up repeats itself; this many repeats in a row end the search.
MAX_REPEATS = 5000


def unique_records(
    make: Callable[[Random], Record], *, n_documents: int, seed: int, key: str
) -> Iterator[Record]:
    """Yield ``n_documents`` records that differ in ``key``, each with an ``id`` in front.

    Raises:
        DataError: the generator knows fewer different records than were asked for.
    """
    rng = Random(seed)
    seen: set[str] = set()
    repeats = 0
    while len(seen) < n_documents:
        record = make(rng)
        if record[key] in seen:
            repeats += 1
            if repeats > MAX_REPEATS:
                raise DataError(
                    f"n_documents: {n_documents} is more than this generator can make; "
                    f"ask for at most {len(seen)}"
                )
            continue
        repeats = 0
        seen.add(record[key])
        yield {"id": f"{len(seen):06d}", **record}


def build_generator(
    make: Callable[[Random], Record], *, key: str
) -> Callable[..., dict[str, Path]]:
    """Build the ``generate`` of a generator that writes ``records.jsonl`` and no other file."""

    def generate(*, n_documents: int, seed: int, directory: Path) -> dict[str, Path]:
        records = unique_records(make, n_documents=n_documents, seed=seed, key=key)
        write_records(directory, records)
        return {}

    return generate


def write_records(directory: Path, records: Iterable[Record]) -> Path:
    """Write ``directory/records.jsonl``: one JSON object a line, keys in the generator's order."""
    path = directory / "records.jsonl"
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_text(path, "".join(f"{line}\n" for line in lines))
    return path
