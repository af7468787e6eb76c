"""Check on the device what tests check on the CPU: isolated documents, reproducible weights."""

import gc
import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.tokens.arrow import read_rows
from expertflow.train.feed.batches import Batch, Collator
from expertflow.train.model import attention
from expertflow.train.model.load import DTYPES, load_base
from expertflow.train.model.packed import causal_lm, find_head, hidden_states
from expertflow.train.model.weights import weights_sha256
from expertflow.train.processes import start_processes
from expertflow.train.saved import checkpoint_files
from expertflow.train.step_hooks import save_checkpoint
from gpu_kit.training import Session, Variant, Work, plan_of

N_STEPS, STOP_AT = 6, 3
# Number of vocabulary entries that are compared.
N_LOGITS = 4096
# A bf16 product is accurate to 2^-8; layers add up to a few of these, relative to the top logit.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-4}


class Check(Record, frozen=True, kw_only=True):
    """A check's result. ``passed`` is null if it cannot run here."""

    passed: bool | None
    figures: dict[str, Any]


def route(work: Work) -> Check:
    """Return which kernels this machine has, and which one training uses."""
    device = torch.device(work.device)
    plan = plan_of(work, Variant())
    words = attention.describe_route(plan.attention, device=device, dtype=DTYPES[plan.precision])
    impls = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    figures = {
        "route": words,
        "flash": attention.activate_flash_3(device),
        "torch_knows": list(impls),
        "kernel_takes": sorted(inspect.signature(attention.KERNEL).parameters),
        "torch": torch.__version__,
    }
    if work.device == "cuda":
        major, minor = torch.cuda.get_device_capability(0)
        figures |= {"capability": f"{major}.{minor}", "cuda": torch.version.cuda}
    return Check(passed=None, figures=figures)


def packed_is_separate(work: Work) -> Check:
    """Compare the logits of packed rows with those of every document alone.

    Then change one document: the logits of the others in its row must not change by one bit.
    """
    plan = plan_of(work, Variant())
    dtype, device = DTYPES[plan.precision], torch.device(work.device)
    # A frozen base as in training; the reference is transformers' default route.
    paths = {"packed": plan.attention, "alone": "sdpa"}
    models = {
        name: load_base(
            str(work.folder / "model"), dtype=dtype, attention_name=way
        ).to(device).eval()
        for name, way in paths.items()
    }  # fmt: skip
    rows = read_rows(work.folder / "bfd" / "packed" / "train")
    n_documents = rows.seq_lengths.lengths[:64]
    chosen = np.argsort(-n_documents, kind="stable")[:2]
    batch = Collator(rows).batch(chosen)
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        packed = _logits(models["packed"], batch)
        changed = _logits(models["packed"], _with_other_first_document(batch, bounds))
        alone = _alone(models["alone"], batch, bounds)
    apart = (packed - alone).abs().amax().item() / alone.abs().amax().item()
    second = slice(bounds[1], bounds[-1])
    leak = (packed[second] - changed[second]).abs().amax().item()
    noticed = (packed[: bounds[1]] - changed[: bounds[1]]).abs().amax().item()
    return Check(
        passed=apart <= TOLERANCES[dtype] and leak == 0.0 and noticed > 0.0,
        figures={
            "apart_relative_to_largest_logit": apart,
            "tolerance": TOLERANCES[dtype],
            "leak_into_other_documents": leak,
            "change_in_the_changed_document": noticed,
            "n_documents": len(bounds) - 1,
            "dtype": str(dtype).removeprefix("torch."),
        },
    )


def _logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return some logits at all positions, [B L, N_LOGITS]."""
    lm = causal_lm(model)
    hidden = hidden_states(lm, batch).flatten(0, 1)
    return torch.nn.functional.linear(hidden, find_head(lm).weight_VH[:N_LOGITS]).float()


def _alone(model: Any, batch: Batch, bounds: list[int]) -> torch.Tensor:
    ids = batch.input_ids_BL.flatten().long().to(next(model.parameters()).device)
    parts = []
    for first, end in pairwise(bounds):
        # Without positions and mask: a plain document, causal.
        logits = model(input_ids=ids[None, first:end], use_cache=False).logits[0, :, :N_LOGITS]
        parts.append(logits.float())
    return torch.cat(parts)


def _with_other_first_document(batch: Batch, bounds: list[int]) -> Batch:
    ids = batch.input_ids_BL.clone()
    ids.view(-1)[: bounds[1]] = ids.view(-1)[: bounds[1]].roll(1) ^ 1
    return replace(batch, input_ids_BL=ids)


def same_weights_after_resume(work: Work) -> Check:
    """Train twice with deterministic kernels, once stopped and resumed from its checkpoint."""
    variant = Variant(micro_batch=2)
    plan = plan_of(
        work, variant, deterministic=True, max_steps=N_STEPS, gradient_accumulation_steps=2,
        warmup_ratio=0.1, save_steps=STOP_AT,
    )  # fmt: skip
    processes = start_processes(plan)

    def run(name: str, n_steps: int, resume: Path | None = None) -> str:
        # Each run compiles like one in a new process, and never falls back for lack of cache slots.
        torch.compiler.reset()
        session = Session(work, variant, plan, name=name, processes=processes, checkpoint=resume)
        try:
            while session.run.progress.step < n_steps:
                session.step()
            save_checkpoint(session.run)
            session.run.saver.wait()
            return weights_sha256(session.run.net)
        finally:
            session.close()
            session = None  # type: ignore[assignment]
            gc.collect()

    straight, again = run("straight", N_STEPS), run("again", N_STEPS)
    run("stopped", STOP_AT)
    saved = checkpoint_files.newest_checkpoint(work.folder / "states" / "stopped")
    resumed = run("stopped", N_STEPS, saved)
    other = run("fewer", N_STEPS - 1)
    return Check(
        passed=straight == again == resumed != other,
        figures={
            "straight": straight,
            "again": again,
            "resumed": resumed,
            "one_step_fewer": other,
            "n_steps": N_STEPS,
            "stopped_after": STOP_AT,
        },
    )


CHECKS = {
    "route": route,
    "packed": packed_is_separate,
    "resume": same_weights_after_resume,
}
