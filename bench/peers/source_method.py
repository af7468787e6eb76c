"""The common method: ``datasets.map`` tokenises, ``group_texts`` concatenates and cuts, rows saved.

As in the language-model examples of transformers: a fast tokenizer, batches of 1,000, one process
per core, the remainder of every batch dropped, labels a copy of the ids.
"""

import argparse
from itertools import chain
from typing import Any

import program


def write(args: argparse.Namespace) -> None:
    """Tokenise, group and save."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def tokenise(batch: dict[str, list[str]]) -> Any:
        pairs = zip(batch["prompt"], batch["completion"], strict=True)
        return tokenizer([program.chatml(*pair) for pair in pairs], add_special_tokens=False)

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain(*rows)) for key, rows in batch.items()}
        n = len(joined["input_ids"]) // args.length * args.length
        cuts = range(0, n, args.length)
        result = {key: [ids[i : i + args.length] for i in cuts] for key, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    cache = str(args.output / "cache")
    data = load_dataset("json", data_files=str(args.input), split="train", cache_dir=cache)
    data = data.map(
        tokenise, batched=True, num_proc=args.processes, remove_columns=data.column_names
    )
    data = data.map(group_texts, batched=True, num_proc=args.processes)
    data.save_to_disk(args.output / "rows")


def read(args: argparse.Namespace) -> program.Rows:
    """Give the ids of every row."""
    from datasets import load_from_disk

    for row in load_from_disk(args.output / "rows").with_format("numpy", columns=["input_ids"]):
        yield row["input_ids"]


if __name__ == "__main__":
    program.run(__doc__, write, read)
