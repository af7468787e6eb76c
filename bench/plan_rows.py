"""Plan millions of documents into rows: time, rows above the lower bound, fill.

    python bench/plan_rows.py [--documents 1000000 10000000] [--lengths 1536 2048] [--repeats 3]

Lengths are drawn from a lognormal with a median of 221 and a 99th percentile of about 1,800 tokens,
as in mixtures of instructions; documents longer than a row are split. Beside best-fit-decreasing on
the histogram stand next-fit in the order of the documents, and the share of documents that are cut
when all are laid end to end. Medians over the repeats, one process. Prints a table; the last line
is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.tokens.packing import best_fit_decreasing, concat_pieces, cut

MEDIAN_TOKENS, SPREAD = 221, 0.9


def next_fit(lengths: np.ndarray, row_length: int) -> int:
    """Count the rows when a document that does not fit opens the next row."""
    ends = np.cumsum(lengths, dtype=np.int64)
    n_rows, start = 0, 0
    while start < len(lengths):
        before = ends[start - 1] if start else 0
        start = int(np.searchsorted(ends, before + row_length, side="right"))
        n_rows += 1
    return n_rows


def measure(lengths: np.ndarray, row_length: int, repeats: int) -> dict[str, Any]:
    """Plan the same documents some times."""
    pieces = cut(lengths, row_length=row_length, overflow="split").length
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        rows = best_fit_decreasing(pieces, row_length=row_length)
        seconds.append(time.perf_counter() - start)
    n_tokens = int(pieces.sum(dtype=np.int64))
    whole = pieces[:1_000_000]
    n_cut = concat_pieces(whole, row_length=row_length)[0].n_split
    return {
        "n_documents": len(lengths),
        "row_length_tokens": row_length,
        "plan_s": statistics.median(seconds),
        "plan_s_max": max(seconds),
        "n_rows": len(rows),
        "n_rows_above_bound": len(rows) - -(-n_tokens // row_length),
        "fill_fraction": n_tokens / (len(rows) * row_length),
        "next_fit_fill_fraction": n_tokens / (next_fit(pieces, row_length) * row_length),
        "concat_cut_fraction": n_cut / len(whole),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1536, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(" documents  row   plan s   rows above bound    fill   next-fit  cut by concat")
    results = []
    for n in args.documents:
        drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SPREAD, n)
        lengths = np.clip(drawn, 1, 40_000).astype(np.int32)
        for row_length in args.lengths:
            found = measure(lengths, row_length, args.repeats)
            results.append(found)
            print(
                f"{n:>10,} {row_length:>5} {found['plan_s']:>7.2f} {found['n_rows']:>11,}"
                f" +{found['n_rows_above_bound']:<5} {found['fill_fraction']:>8.3%}"
                f" {found['next_fit_fill_fraction']:>9.1%} {found['concat_cut_fraction']:>10.1%}"
            )
    print(json.dumps({"repeats": args.repeats, "results": results}))


if __name__ == "__main__":
    main()
