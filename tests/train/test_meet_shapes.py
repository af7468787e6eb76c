"""Shapes are met before steps are timed: what is compiled for each is not among these."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import LORA
from tiny_run import made

from expertflow.train import assemble as assembling
from expertflow.train import processes, shapes
from expertflow.train.feed.batches import Batch
from expertflow.train.model import packed
from expertflow.train.run import Run
from expertflow.train.saved.saver import Saver
from expertflow.train.shapes import meet_shapes

N_STEPS = 12


def run_of(folder: Path, saver: Saver, *, compiled: bool) -> Run:
    assignment = made(folder / "run", lora=LORA, n_steps=N_STEPS)
    plan = replace(assignment.plan, torch_compile=compiled)
    run, _ = assembling.assemble(
        replace(assignment, plan=plan), processes=processes.start(plan), saver=saver,
        stop=lambda: False, directory=None,
    )  # fmt: skip
    run.loss.train()
    return run


def shape_of(batch: Batch) -> tuple[int, ...]:
    return (*batch.input_ids_BL.shape, len(packed.padded_bounds(batch, shapes.HOST)))


@pytest.fixture
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell few documents apart, and compile nothing: only what layers are given is looked at."""
    monkeypatch.setattr(packed, "DOCUMENTS_STEP", 2)
    monkeypatch.setattr(assembling, "compile_layers", lambda net, dtype: "compiled in name only")


@pytest.mark.usefixtures("few_documents")
def test_every_shape_to_come_is_met_once_and_leaves_no_trace(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=1) as saver:
        run = run_of(tmp_path, saver, compiled=True)
        seen: list[tuple[int, ...]] = []
        forward: Any = run.loss.forward
        run.loss.forward = lambda batch: seen.append(shape_of(batch)) or forward(batch)
        before = torch.get_rng_state()
        n_met = meet_shapes(run, 10 * N_STEPS)
    batches = map(run.feed.collator.batch, run.feed.between(0, N_STEPS))
    wanted = {shape_of(batch) for batch in batches}
    assert len(wanted) > 1 and n_met == len(seen) == len(wanted) and set(seen) == wanted
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in run.net.parameters())
    assert run.progress.step == 0 and not run.pending


@pytest.mark.usefixtures("few_documents")
def test_what_is_not_compiled_has_no_shapes_to_meet(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=1) as saver:
        assert meet_shapes(run_of(tmp_path, saver, compiled=False), N_STEPS) == 0
