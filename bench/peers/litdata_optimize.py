"""litdata: ``optimize`` with a ``TokensLoader``, a worker per core; rows are cut when read.

As its guide to pre-training tells: the function yields the ids of one document after another, and
chunks hold about 64 MB of tokens. A worker's input is a part of the file.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import program

N_BATCH = 1000


def tokenise(part: tuple[int, int], *, path: Path, tokenizer: Path) -> Iterator[Any]:
    """Give the ids of the documents of one part of the file."""
    import itertools

    import orjson
    import torch
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rows = program.lines(path, *part)
    while batch := list(itertools.islice(rows, N_BATCH)):
        records = map(orjson.loads, batch)
        texts = [program.chatml(r["prompt"], r["completion"]) for r in records]
        for encoded in engine.encode_batch_fast(texts, add_special_tokens=False):
            yield torch.tensor(encoded.ids, dtype=torch.int32)


def write(args: argparse.Namespace) -> None:
    """Tokenise the parts of the file."""
    from litdata import TokensLoader, optimize

    # A few parts per worker, so that they end together.
    parts = program.byte_ranges(args.input, args.processes * 4)
    optimize(
        fn=partial(tokenise, path=args.input, tokenizer=args.tokenizer),
        inputs=parts,
        output_dir=str(args.output / "rows"),
        num_workers=args.processes,
        chunk_size=args.length * 8192,
        reorder_files=False,
        item_loader=TokensLoader(),
        verbose=False,
    )


def read(args: argparse.Namespace) -> program.Rows:
    """Give the ids of every row."""
    from litdata import StreamingDataset, TokensLoader

    loader = TokensLoader(block_size=args.length)
    data = StreamingDataset(str(args.output / "rows"), item_loader=loader, shuffle=False)
    for i in range(len(data)):
        yield data[i].numpy()


if __name__ == "__main__":
    program.run(__doc__, write, read)
