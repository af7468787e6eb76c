"""Meet the shapes of steps before they are timed, so that nothing is compiled among them."""

import torch
from msgspec.structs import replace

from expertflow.train.feed.loader import Feed
from expertflow.train.memory import memory_advice
from expertflow.train.model.packed import padded_bounds
from expertflow.train.run import Run

HOST = torch.device("cpu")


def meet_shapes(run: Run, n_steps: int) -> int:
    """Run one micro-batch of each shape of the next steps and forget it; say how many these were.

    Compiled layers are compiled anew for the last micro-batch of an epoch, and for each number of
    documents that bounds are padded to. That takes longer than many steps, and may come late.
    Rows that are cut to the longest of their batch have too many shapes to be met.
    """
    feed, first = run.feed, run.progress.step
    if not run.plan.torch_compile or not isinstance(feed, Feed) or feed.collator.cuts:
        return 0
    # The loader's thread is ahead in the other order, and keeps no more epochs than it needs.
    own = replace(feed, order=replace(feed.order, _made={}))
    met: set[tuple[int, ...]] = set()
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices), memory_advice(run.plan, run.device):
        for rows in own.between(first, min(first + n_steps, feed.n_steps)):
            batch = feed.collator.batch(rows)
            shape = (*batch.input_ids_BL.shape, len(padded_bounds(batch, HOST)))
            if shape not in met:
                met.add(shape)
                with run.processes.accelerator.autocast():
                    loss = run.loss(batch)
                run.processes.accelerator.backward(loss)
                run.optimizer.zero_grad(set_to_none=True)
    return len(met)
