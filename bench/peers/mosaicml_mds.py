"""MosaicML streaming: an ``MDSWriter`` per core, their indexes merged; concatenate and cut.

As its guide to parallel conversion tells, each process writes a part of the file into a folder of
its own; as in LLM Foundry, documents are joined and cut to rows, and the last incomplete row of
each process is dropped. The library imports torchvision for its image data sets; a stand-in takes
its place, which saves the peer some time and needs no build that fits torch's.
"""

import argparse
import itertools
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import Pool
from pathlib import Path
from types import ModuleType

import program

N_BATCH = 1000


def stand_in_for_torchvision() -> None:
    """Put empty modules where the library looks for torchvision."""
    wanted = {"datasets": "VisionDataset", "transforms": "", "transforms.functional": "to_tensor"}
    for name, content in {"": "", **wanted}.items():
        full = f"torchvision.{name}".rstrip(".")
        module = ModuleType(full)
        module.__spec__ = ModuleSpec(full, None, is_package=True)
        if content:
            setattr(module, content, type(content, (), {}))
        sys.modules[full] = module


def convert(
    job: tuple[int, tuple[int, int]], *, path: Path, tokenizer: Path, length: int, output: Path
) -> None:
    """Write the rows of one part of the file."""
    import numpy as np
    import orjson
    from streaming import MDSWriter
    from tokenizers import Tokenizer

    number, part = job
    engine = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rows = program.lines(path, *part)
    left = np.zeros(0, np.int32)
    columns = {"tokens": f"ndarray:int32:{length}"}
    with MDSWriter(out=str(output / f"{number:05}"), columns=columns) as writer:
        while batch := list(itertools.islice(rows, N_BATCH)):
            records = map(orjson.loads, batch)
            texts = [program.chatml(r["prompt"], r["completion"]) for r in records]
            encoded = engine.encode_batch_fast(texts, add_special_tokens=False)
            ids = np.concatenate([left, *(np.array(e.ids, np.int32) for e in encoded)])
            n = len(ids) // length
            for row in ids[: n * length].reshape(n, length):
                writer.write({"tokens": row})
            left = ids[n * length :]


def write(args: argparse.Namespace) -> None:
    """Convert the parts of the file and merge what they say."""
    from streaming.base.util import merge_index

    rows = args.output / "rows"
    rows.mkdir(parents=True)
    job = partial(
        convert, path=args.input, tokenizer=args.tokenizer, length=args.length, output=rows
    )
    with Pool(args.processes) as pool:
        pool.map(job, enumerate(program.byte_ranges(args.input, args.processes)))
    merge_index(str(rows), keep_local=True)


def read(args: argparse.Namespace) -> program.Rows:
    """Give the ids of every row."""
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(args.output / "rows"), batch_size=1)
    for i in range(len(data)):
        yield data[i]["tokens"]


if __name__ == "__main__":
    stand_in_for_torchvision()
    program.run(__doc__, write, read)
