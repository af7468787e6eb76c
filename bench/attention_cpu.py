"""Compare two CPU routes for packed attention: one block-diagonal mask, or a call per document.

    python bench/attention_cpu.py

Forward and backward of two layers, 4 query and 2 key heads of width 32, both routes in turn;
medians over the repeats. Prints a table; the last line is JSON. The mask costs one call per layer
and computes pairs across documents in vain; the loop, which training uses, computes none. Run it
on a quiet machine: beside other processes the many small calls of the loop looked slower than they
are.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.train.model.masks import document_mask

CASES = [(8, 256, 4), (8, 512, 4), (4, 2048, 8), (2, 2048, 2)]
REPEATS, LAYERS, HEADS, KEY_HEADS, WIDTH = 9, 2, 4, 2, 32


def routes(n_rows: int, length: int, n_documents: int) -> dict[str, Callable[[], None]]:
    """Give both routes over the same rows, each of ``n_documents`` equal documents."""
    size = length // n_documents
    positions = torch.arange(size).repeat(n_documents).repeat(n_rows, 1)
    shapes = (HEADS, KEY_HEADS, KEY_HEADS)
    q, k, v = (torch.randn(n_rows, heads, length, WIDTH, requires_grad=True) for heads in shapes)

    def mask() -> None:
        allowed = document_mask(positions)
        for _ in range(LAYERS):
            out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
            out.sum().backward()

    def loop() -> None:
        for _ in range(LAYERS):
            parts = []
            for row in range(n_rows):
                for start in range(0, length, size):
                    part = [t[row : row + 1, :, start : start + size] for t in (q, k, v)]
                    parts.append(
                        scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
                    )
            torch.cat(parts, dim=2).sum().backward()

    return {"mask": mask, "loop": loop}


def main() -> None:
    """Time every case."""
    torch.set_num_threads(2)
    rows = []
    print(f"{'rows':>5} {'length':>7} {'docs':>5} {'mask ms':>9} {'loop ms':>9} {'loop/mask':>10}")
    for case in CASES:
        times: dict[str, list[float]] = {"mask": [], "loop": []}
        for _ in range(REPEATS):
            for name, route in routes(*case).items():
                start = time.perf_counter()
                route()
                times[name].append(1000 * (time.perf_counter() - start))
        mask_ms, loop_ms = (statistics.median(times[name]) for name in ("mask", "loop"))
        ratio = loop_ms / mask_ms
        print("{:5} {:7} {:5}".format(*case), f"{mask_ms:9.1f} {loop_ms:9.1f} {ratio:10.2f}")
        rows.append({"case": case, "mask_ms": mask_ms, "loop_ms": loop_ms, "loop_by_mask": ratio})
    print(json.dumps({"torch": torch.__version__, "n_threads": 2, "rows": rows}))


if __name__ == "__main__":
    main()
