"""What the peers' programs share: arguments, and how rows are counted.

A program writes rows the way its library does. Called again with ``--read``, it reads them back
with the library's own reader and prints, as JSON, how many rows and tokens there are.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A reader may yield the documents of a row; others yield complete rows.
Rows = Iterator[Any]


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input", type=Path, required=True, help="JSON Lines of text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer.json")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--read", action="store_true", help="count the rows that were written")
    return parser.parse_args()


def run(
    description: str | None,
    write: Callable[[argparse.Namespace], None],
    read: Callable[[argparse.Namespace], Rows],
) -> None:
    """Write rows, or read them back and count them."""
    args = arguments(description)
    if args.read:
        print(json.dumps(count_tokens(read(args))))
    else:
        write(args)


def map_records(args: argparse.Namespace, tokenize: Callable[..., Any]) -> Any:
    """Load the records with datasets and tokenize them in batches of 1,000."""
    from datasets import load_dataset

    cache = str(args.output / "cache")
    data = load_dataset("json", data_files=str(args.input), split="train", cache_dir=cache)
    return data.map(
        tokenize, batched=True, num_proc=args.processes, remove_columns=data.column_names
    )


def read_saved(args: argparse.Namespace) -> Rows:
    """Return the ids of every row saved by datasets."""
    from datasets import load_from_disk

    for row in load_from_disk(args.output / "rows").with_format("numpy", columns=["input_ids"]):
        yield row["input_ids"]


def count_tokens(rows: Rows) -> dict[str, int]:
    lengths = [len(row) for row in rows]
    return {"n_rows": len(lengths), "n_tokens": sum(lengths)}


def byte_ranges(path: Path, n: int) -> list[tuple[int, int]]:
    """Split a file of lines into parts of about equal size, at line ends."""
    size = path.stat().st_size
    cuts = [0]
    with path.open("rb") as stream:
        for i in range(1, n):
            stream.seek(max(cuts[-1], size * i // n))
            stream.readline()
            cuts.append(min(stream.tell(), size))
    return list(zip(cuts, [*cuts[1:], size], strict=True))
