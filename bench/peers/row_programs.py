"""Peers of the data path: records become rows as each library's own documentation recommends.

    PEER/python bench/peers/row_programs.py NAME --input FILE.jsonl --tokenizer DIR --output ROWS

- source_method: ``datasets.map`` tokenizes and ``group_texts`` concatenates and cuts, as in the
  language-model examples of transformers: batches of 1,000, one process per core, the remainder of
  every batch dropped, labels a copy of the ids;
- trl: ``pack_dataset`` packs best-fit-decreasing, as ``SFTTrainer`` prepares its data with
  ``packing=True``: the attention mask is dropped, packing runs in batches of 1,000 documents in
  one process per core, and documents longer than a row are truncated;
- datatrove: ``JsonlReader`` and ``DocumentTokenizer``, one task per core; tokens, not yet packed.
  Documents are not shuffled, which would write the tokens twice.
"""

import argparse
from contextlib import ExitStack
from itertools import chain, cycle
from pathlib import Path
from typing import Any

Batch = dict[str, Any]


def tokenize(args: argparse.Namespace, columns: list[str] | None = None) -> Any:
    """Load the records with datasets and tokenize them in batches of 1,000."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def tokenize_batch(batch: Batch) -> Batch:
        encoded = tokenizer(batch["text"], add_special_tokens=False)
        return {name: encoded[name] for name in columns or encoded}

    cache = str(args.output.parent / "cache")
    data = load_dataset("json", data_files=str(args.input), split="train", cache_dir=cache)
    return data.map(
        tokenize_batch, batched=True, num_proc=args.processes, remove_columns=data.column_names
    )


def source_method(args: argparse.Namespace) -> None:
    def group_texts(batch: Batch) -> Batch:
        joined = {key: list(chain(*rows)) for key, rows in batch.items()}
        n = len(joined["input_ids"]) // args.length * args.length
        cuts = range(0, n, args.length)
        result = {key: [ids[i : i + args.length] for i in cuts] for key, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    data = tokenize(args).map(group_texts, batched=True, num_proc=args.processes)
    data.save_to_disk(args.output)


def trl(args: argparse.Namespace) -> None:
    from trl import pack_dataset

    data = tokenize(args, ["input_ids"])
    data = pack_dataset(data, args.length, strategy="bfd", map_kwargs={"num_proc": args.processes})
    data.save_to_disk(args.output)


def datatrove(args: argparse.Namespace) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    # A reader's tasks divide the files, so the corpus is first copied into one file per task.
    parts = args.output.parent / "parts"
    parts.mkdir()
    with args.input.open("rb") as lines, ExitStack() as stack:
        files = [
            stack.enter_context((parts / f"{number:05}.jsonl").open("wb"))
            for number in range(args.processes)
        ]
        for line, file in zip(lines, cycle(files), strict=False):
            file.write(line)
    tokenizer = DocumentTokenizer(
        output_folder=str(args.output),
        tokenizer_name_or_path=str(args.tokenizer / "tokenizer.json"),
        eos_token=None,
        shuffle_documents=False,
        seed=0,
    )
    LocalPipelineExecutor(
        pipeline=[JsonlReader(str(parts)), tokenizer],
        tasks=args.processes,
        workers=args.processes,
        logging_dir=str(args.output.parent / "logs"),
    ).run()


PROGRAMS = {"source_method": source_method, "trl": trl, "datatrove": datatrove}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("--input", type=Path, required=True, help="JSON Lines of text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer.json")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--output", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    PROGRAMS[arguments.name](arguments)
