"""Measure the ways to a summed loss at a large vocabulary: CPU seconds and memory.

    python bench/loss_cpu.py [--repeats 3] [--hidden 128] [--vocabulary 151936] [--bf16] [--frozen]

Forward and backward pass over 2 rows of 1,024 tokens of which 30 % are supervised, random numbers.
With ``--bf16`` products are done in bf16 (autocast; a frozen head and what comes into it are held
in bf16), with ``--frozen`` the head gets no gradient. Ways:

- all rows: logits of every row, then torch's cross-entropy;
- rows selected: logits of supervised rows only;
- checkpointed: the same 256 rows at a time, made again in the backward pass;
- torch fused, 256: ``linear_cross_entropy`` in chunks of 256 (torch 2.13 or newer);
- torch fused, default: the same with torch's own choice of chunks;
- expertflow: what training uses.

Every run is a process of its own with 2 threads, the ways in turn. CPU seconds count both threads;
memory is the highest resident size less that before the loss. Prints a table of medians, with the
loss, since not all come to the same; the last line is JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.tokens.targets import IGNORE
from expertflow.train.model.loss import summed_loss

ROWS, LENGTH, SUPERVISED, CHUNK = 2, 1024, 0.3, 256
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WAYS = (
    "all rows", "rows selected", "checkpointed", "torch fused, 256", "torch fused, default",
    "expertflow",
)  # fmt: skip


def tensors(options: argparse.Namespace) -> Tensors:
    """Give hidden states, head and labels."""
    torch.manual_seed(0)
    labels = torch.randint(0, options.vocabulary, (ROWS, LENGTH), dtype=torch.int32)
    labels[torch.rand(ROWS, LENGTH) >= SUPERVISED] = IGNORE
    labels[:, 0] = IGNORE
    hidden = torch.randn(ROWS, LENGTH, options.hidden)
    head = torch.randn(options.vocabulary, options.hidden) * 0.02
    if options.bf16 and options.frozen:
        hidden, head = hidden.bfloat16(), head.bfloat16()
    return hidden.requires_grad_(), head.requires_grad_(not options.frozen), labels


def plain(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Keep the logits of all rows given."""
    logits = functional.linear(hidden, head).float()
    return functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)


def fused(chunk: int | None) -> Callable[..., torch.Tensor]:
    """Give torch's operation; null ``chunk`` leaves the choice to it."""

    def run(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return functional.linear_cross_entropy(
            hidden, head, targets, reduction="sum", options=options
        )

    return run


def checkpointed(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Make the logits of a chunk again in the backward pass."""
    total = torch.zeros(())
    for start in range(0, len(targets), CHUNK):
        part = slice(start, start + CHUNK)
        total = total + checkpoint(plain, hidden[part], head, targets[part], use_reentrant=False)
    return total


def loss_of(way: str, given: Tensors) -> torch.Tensor:
    """Compute the summed loss one way."""
    hidden, head, labels = given
    if way == "expertflow":
        return summed_loss(hidden, head, labels, n_targets=int((labels != IGNORE).sum()))
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten().long()
    rows = hidden.flatten(0, 1)
    if way == "all rows":
        return plain(rows, head, targets)
    chosen = targets != IGNORE
    ways = {
        "rows selected": plain,
        "checkpointed": checkpointed,
        "torch fused, 256": fused(CHUNK),
        "torch fused, default": fused(None),
    }
    return ways[way](rows[chosen], head, targets[chosen])


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one way once, in this process."""
    torch.set_num_threads(2)
    given = tensors(options)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
        loss = loss_of(way, given)
    loss.backward()
    cpu_s = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_s": cpu_s, "peak_mb": (peak - resident) / 1e6, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.way, options)))
        return
    ways = [w for w in WAYS if "fused" not in w or hasattr(functional, "linear_cross_entropy")]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way in ways:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(out))
    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for way, runs in found.items()
    }
    print(f"{'':24}{'CPU s':>8}{'peak MB':>10}{'loss':>12}")
    for way, values in medians.items():
        print(f"{way:24}{values['cpu_s']:8.2f}{values['peak_mb']:10.0f}{values['loss']:12.3f}")
    settings = {k: v for k, v in vars(options).items() if k != "way"}
    print(json.dumps({"torch": torch.__version__, **settings, "ways": medians}))


if __name__ == "__main__":
    main()
