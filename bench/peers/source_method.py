"""The common method: ``datasets.map`` tokenizes, ``group_texts`` concatenates and cuts, rows saved.

As in the language-model examples of transformers: a fast tokenizer, batches of 1,000, one process
per core, the remainder of every batch dropped, labels a copy of the ids.
"""

import argparse
from itertools import chain
from typing import Any

import program


def write(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"], add_special_tokens=False)

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain(*rows)) for key, rows in batch.items()}
        n = len(joined["input_ids"]) // args.length * args.length
        cuts = range(0, n, args.length)
        result = {key: [ids[i : i + args.length] for i in cuts] for key, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    data = program.map_records(args, tokenize)
    data = data.map(group_texts, batched=True, num_proc=args.processes)
    data.save_to_disk(args.output / "rows")


if __name__ == "__main__":
    program.run(__doc__, write, program.read_saved)
