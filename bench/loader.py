"""Measure how fast packed rows become batches, by each way to load them.

    python bench/loader.py [--rows 16384] [--repeats 7] [--workers 1 2]

Rows of 2,048 tokens, batches of 16, one epoch in the order of training. The rows are packed from
documents of realistic lengths (log-normal, median 180 tokens), the second part of each supervised;
ids are random. They are written as ``pack_sequences`` writes them and read back, so that ids come
from the mapped file. Ways:

- thread: the trainer's loader, at several prefetches;
- inline: the same batches, made when they are asked for, no thread;
- workers: torch's DataLoader with so many worker processes (0: in the trainer);
- datasets: ``load_from_disk`` in torch format under a DataLoader; of each row it gives the stored
  columns, without labels, positions and bounds of documents.

Every repeat runs each way once, in a new order; start and end of threads and processes count, and
so does the order of the epoch. What a run counts once, before its first epoch, does not: the tokens
and targets of every row. The consumer looks at nothing but the number of tokens. Prints a table of
medians; the last line is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.plan.records import LoaderPlan
from expertflow.tokens.arrow import PackedRows, RowBatch, read_rows, write_rows
from expertflow.tokens.ragged import ragged
from expertflow.train.feed.batches import Buffers, Collator
from expertflow.train.feed.loader import Feed, load_batches
from expertflow.train.feed.order import RowOrder

LENGTH, BATCH, PREFETCHES = 2048, 16, (1, 2, 4, 8)
MEDIAN_TOKENS, SPREAD, SHORTEST = 180.0, 0.8, 8
ROWS_A_PART = 1024
CPU = torch.device("cpu")
Way = Callable[[], int]


def make_rows(folder: Path, n_rows: int) -> PackedRows:
    """Fill rows with documents in the order they are drawn; the last one of a row is cut to fit."""
    rng = np.random.default_rng(0)
    lengths, spans = [], []
    for _ in range(n_rows):
        drawn = rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, LENGTH // SHORTEST)
        ends = np.minimum(np.cumsum(np.maximum(drawn.astype(int), SHORTEST)), LENGTH)
        # One row in two has a few places left, as best-fit packing leaves them.
        ends = np.unique(np.minimum(ends, LENGTH - int(rng.integers(2) * rng.integers(8))))
        n = np.diff(ends, prepend=0)
        starts = ends - np.maximum(1, n // 2)
        lengths.append(n.tolist())
        spans.append(np.stack([starts, ends], axis=1).reshape(-1).tolist())

    def parts() -> Iterator[RowBatch]:
        for start in range(0, n_rows, ROWS_A_PART):
            part = slice(start, start + ROWS_A_PART)
            ids = rng.integers(0, 150_000, (len(lengths[part]), LENGTH), dtype=np.int32)
            yield RowBatch(ids, ragged(lengths[part]), ragged(spans[part]))

    write_rows(folder, parts(), length=LENGTH)
    return read_rows(folder)


def feed_of_epoch(collator: Collator) -> Feed:
    """Give one epoch; the order is made anew, as its cost is part of an epoch."""
    n_rows = len(collator.rows)
    n_steps = -(-n_rows // BATCH)
    return Feed(
        collator=collator,
        order=RowOrder(n_rows=n_rows, global_batch=BATCH, seed=0),
        micro_batch_size=BATCH,
        n_steps=n_steps,
        n_steps_per_epoch=n_steps,
    )


def by_loader(collator: Collator, plan: LoaderPlan) -> int:
    """Run through an epoch as the trainer does."""
    feed = feed_of_epoch(collator)
    with load_batches(feed, 0, plan=plan, device=CPU) as batches:
        return sum(batch.n_tokens for batch in batches)


def inline(collator: Collator) -> int:
    """Make each batch when it is asked for, in the same buffers."""
    feed, buffers = feed_of_epoch(collator), Buffers(BATCH, LENGTH)
    todo = feed.between(0, feed.n_steps)
    return sum(collator.batch(chosen, buffers).n_tokens for chosen in todo)


def by_datasets(folder: Path, n_workers: int) -> int:
    """Load with ``datasets`` in torch format; the ids are stacked, the rest stays as it is."""
    import datasets
    from torch.utils.data import DataLoader

    rows = datasets.load_from_disk(str(folder)).with_format("torch")
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        rows,
        batch_size=BATCH,
        shuffle=True,
        num_workers=n_workers,
        collate_fn=stacked,
        generator=generator,
    )
    return sum(int(n_tokens) for _, n_tokens in loader)


def stacked(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
    """Stack the ids of a batch; count its tokens."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return ids, sum(int(row["seq_lengths"].sum()) for row in rows)


def ways(rows: PackedRows, folder: Path, workers: list[int]) -> dict[str, Way]:
    """Name the ways to load one epoch."""

    def plan(n_workers: int | None, n_prefetch: int) -> LoaderPlan:
        return LoaderPlan(
            kind="thread" if n_workers is None else "workers",
            n_workers=n_workers or 0,
            n_prefetch_batches=n_prefetch,
            persistent_workers=False,
        )

    collator = Collator(rows)
    named: dict[str, Way] = {
        f"thread, prefetch {n}": partial(by_loader, collator, plan(None, n)) for n in PREFETCHES
    }
    named["inline"] = partial(inline, collator)
    for n in [0, *workers]:
        named[f"DataLoader, {n} workers"] = partial(by_loader, collator, plan(n, 2))
    for n in [0, *workers]:
        named[f"datasets, {n} workers"] = partial(by_datasets, folder, n)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "rows"
        rows = make_rows(folder, arguments.rows)
        named = ways(rows, folder, arguments.workers)
        n_tokens = int(rows.seq_lengths.values.sum())
        seconds: dict[str, list[float]] = {name: [] for name in named}
        shuffled = random.Random(0)
        for repeat in range(arguments.repeats + 1):
            for name in shuffled.sample(sorted(named), len(named)):
                start = time.perf_counter()
                found = named[name]()
                if repeat:  # the first round warms the caches
                    seconds[name].append(time.perf_counter() - start)
                assert found == n_tokens, f"{name}: {found} tokens of {n_tokens}"
    n_places = arguments.rows * LENGTH
    speeds = {name: n_places / statistics.median(s) / 1e6 for name, s in seconds.items()}
    lowest = {name: n_places / max(s) / 1e6 for name, s in seconds.items()}
    highest = {name: n_places / min(s) / 1e6 for name, s in seconds.items()}
    n_documents = len(rows.seq_lengths.values)
    print(f"{arguments.rows} rows of {LENGTH} tokens, {n_documents} documents, batches of {BATCH}")
    print(f"{'Mtok/s':24}{'median':>10}{'lowest':>10}{'highest':>10}")
    for name in named:
        print(f"{name:24}{speeds[name]:10.0f}{lowest[name]:10.0f}{highest[name]:10.0f}")
    result = {"n_rows": arguments.rows, "n_documents": n_documents, "repeats": arguments.repeats}
    print(json.dumps({**result, "mtok_per_s": {k: round(v, 1) for k, v in speeds.items()}}))


if __name__ == "__main__":
    main()
