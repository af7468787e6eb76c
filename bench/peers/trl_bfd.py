"""TRL: ``datasets.map`` tokenizes, ``pack_dataset`` packs best-fit-decreasing, rows saved.

As ``SFTTrainer`` prepares its data with ``packing=True``: the attention mask is dropped, packing
runs in batches of 1,000 documents in one process per core, and documents longer than a row are
truncated.
"""

import argparse
from typing import Any

import program


def write(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer
    from trl import pack_dataset

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    data = program.map_records(args, tokenize)
    data = pack_dataset(data, args.length, strategy="bfd", map_kwargs={"num_proc": args.processes})
    data.save_to_disk(args.output / "rows")


if __name__ == "__main__":
    program.run(__doc__, write, program.read_saved)
