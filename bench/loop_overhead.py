"""Measure what the training loop costs beside the model: everything a step does but its products.

    PYTHONPATH=tests:workflow/scripts python bench/loop_overhead.py

The real loop (feed, loader thread, clock, timer, log lines, Accelerate) runs over a "model" that is
one small parameter, so that its products take next to nothing; the same products in six lines of
plain torch are the floor. The difference is the loop's own cost. It is the same for a model of any
size, so its share follows from how long a step takes; on a GPU the host runs ahead and hides it.

Prints a table; the last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "train"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from tiny_run import made

from expertflow.train import loop, processes
from expertflow.train.assemble import assemble
from expertflow.train.feed.loader import load_batches
from expertflow.train.saved.saver import Saver
from expertflow.train.step_log import flush

STEP_S = (0.1, 1.0)


class Nothing(torch.nn.Module):
    """A loss that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, batch: Any) -> torch.Tensor:
        """Give a number that depends on the one parameter."""
        return self.weight.sum() * batch.n_target_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(ours_s(Path(folder) / str(i), args), floor_s(args)) for i in range(args.repeats)]
    ours, floor = (1e6 * statistics.median(pair[i] for pair in pairs) for i in range(2))
    own = 1e6 * statistics.median(a - b for a, b in pairs)
    print(f"micro-batches a step        {args.micro_batches}")
    print(f"the loop, nothing to learn  {ours:8.0f} us a step")
    print(f"six lines of plain torch    {floor:8.0f} us a step")
    print(f"the loop's own              {own:8.0f} us a step")
    for step_s in STEP_S:
        print(f"  of a step of {step_s:g} s         {own / step_s / 1e6:8.3%}")
    shares = {f"share_of_{step_s:g}_s": own / step_s / 1e6 for step_s in STEP_S}
    print(json.dumps({"micro_batches": args.micro_batches, "loop_us": own, **shares}))


def ours_s(folder: Path, args: argparse.Namespace) -> float:
    """Give the seconds a step of the real loop, with a log line every ten."""
    assignment = made(folder, n_steps=args.steps, gradient_accumulation_steps=args.micro_batches)
    assignment = replace(assignment, plan=replace(assignment.plan, logging_steps=10))
    group = processes.start(assignment.plan)
    with Saver(assignment.state, keep=1) as saver:
        run, _ = assemble(
            assignment, processes=group, saver=saver, stop=lambda: False, directory=None
        )
        run.loss = Nothing()
        own = torch.optim.AdamW(run.loss.parameters(), fused=True)
        run.optimizer = group.scaled(own)
        loading = load_batches(run.feed, 0, plan=run.plan.loader, device=run.device)
        with loading as batches:
            start = time.perf_counter()
            for _ in range(args.steps):
                run.pending.append(loop.step(run, batches))
                if len(run.pending) == run.plan.logging_steps:
                    flush(run)
            return (time.perf_counter() - start) / args.steps


def floor_s(args: argparse.Namespace) -> float:
    """Give the seconds a step of the same products in plain torch."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight], fused=True)
    start = time.perf_counter()
    for _ in range(args.steps):
        for _ in range(args.micro_batches):
            (weight.sum() * 0.5).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / args.steps


if __name__ == "__main__":
    main()
