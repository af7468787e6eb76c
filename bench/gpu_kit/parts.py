"""The parts of the kit by name, most valuable first."""

import gc
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expertflow.core.disk import check_space
from expertflow.core.errors import HardwareError
from expertflow.core.records import to_json
from expertflow.plan.flops import CONVENTION, linear_weights
from expertflow.tokens.arrow import PackedRows, read_rows
from expertflow.train.feed.batches import Collator
from expertflow.train.memory import OutOfMemory
from expertflow.train.model.packed import causal_lm, find_head, hidden_states
from expertflow.train.model.weights import weights_sha256
from expertflow.train.processes import start_processes
from expertflow.train.saved import checkpoint_files
from expertflow.train.step_hooks import save_checkpoint
from gpu_kit.ceilings import measure_ceilings
from gpu_kit.fixtures import LENGTHS_WORDS, SIZES, make_model, make_rows
from gpu_kit.peers import PEERS, time_peer
from gpu_kit.training import Variant, Work, open_session, plan_of, train

N_STEPS, STOP_AT = 6, 3


VARIANTS = {
    name: variant
    for method in ("lora", "full")
    for name, variant in {
        method: Variant(method=method),
        f"{method}-no-compile": Variant(method=method, changes={"torch_compile": False}),
        f"{method}-sdpa-mask": Variant(method=method, changes={"attention": "sdpa"}),
        f"{method}-checkpointing": Variant(method=method, flip_checkpointing=True),
    }.items()
} | {"dora": Variant(use_dora=True), "qlora": Variant(method="qlora")}


def prepare(work: Work) -> dict[str, Any]:
    """Write model and rows; describe the machine."""
    cuda = work.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise HardwareError("--device cuda: torch sees no CUDA device; use --device cpu")
    size = SIZES[work.model]
    facts = size.facts
    needed = 4 * (linear_weights(facts) + 2 * facts.hidden_size * facts.vocab_size)
    check_space([(work.folder, needed, "model and checkpoints")], fix="choose another --scratch")
    sizes = make_model(work.folder / "model", work.model, device=work.device)
    packing = make_rows(work.folder, work.model)
    split = packing.train
    return {
        "sizes": sizes,
        "packing": to_json(packing),
        "machine": {
            "device": torch.cuda.get_device_name(0) if cuda else "cpu",
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": version("transformers"),
            "peft": version("peft"),
        },
        "rows": {
            "lengths": LENGTHS_WORDS,
            "row_length": size.row_length,
            "n_rows": split.n_sequences,
            "n_rows_unpacked": split.n_documents,
            "mean_document_tokens": split.n_tokens / split.n_documents,
            "sum_len_sq_over_sum_len": split.sum_len_sq / split.n_tokens,
            "supervised_share": split.n_target_tokens / split.n_tokens,
            "padding_share": 1 - split.n_tokens / (split.n_sequences * size.row_length),
        },
        "convention": CONVENTION,
    }


def same_weights_after_resume(work: Work) -> dict[str, Any]:
    """Train twice with deterministic kernels, once stopped and resumed from its checkpoint."""
    plan = plan_of(
        work, Variant(micro_batch=2), deterministic=True, max_steps=N_STEPS,
        gradient_accumulation_steps=2, warmup_ratio=0.1, save_steps=STOP_AT,
    )  # fmt: skip
    processes = start_processes(plan)

    def run(name: str, n_steps: int, resume: Path | None = None) -> str:
        # The model of the run before is freed, and each run compiles like one in a new process, and
        # never falls back for lack of cache slots.
        gc.collect()
        torch.compiler.reset()
        with open_session(work, plan, name=name, processes=processes, checkpoint=resume) as session:
            while session.run.progress.step < n_steps:
                session.step()
            save_checkpoint(session.run)
            session.run.saver.wait()
            return weights_sha256(session.run.net)

    straight, again = run("straight", N_STEPS), run("again", N_STEPS)
    run("stopped", STOP_AT)
    saved = checkpoint_files.newest_checkpoint(work.folder / "states" / "stopped")
    resumed = run("stopped", N_STEPS, saved)
    other = run("fewer", N_STEPS - 1)
    return {
        "passed": straight == again == resumed != other,
        "figures": {
            "straight": straight,
            "again": again,
            "resumed": resumed,
            "one_step_fewer": other,
            "n_steps": N_STEPS,
            "stopped_after": STOP_AT,
        },
    }


@torch.no_grad()
def packed_as_alone(work: Work) -> dict[str, Any]:
    """Compare the logits of every document of a full row with those of the document alone.

    Where it is, with other tokens around it, they must be equal to the bit. At the start of a row,
    the same kernels may add in another order: the largest difference is relative to all logits.
    """
    plan, rows = plan_of(work, Variant()), read_rows(work.folder / "packed" / "train")
    index = np.argmax(rows.seq_lengths.lengths)[None]
    [ids], [lengths] = rows.take_ids(index), rows.seq_lengths.take(index).tolist()
    found = []
    with open_session(work, plan, name="packing") as session:
        lm = causal_lm(session.run.loss.eval().model)

        def logits(ids: Any, lengths: list[int], chosen: slice) -> torch.Tensor:
            padding = [len(ids) - sum(lengths)] if len(ids) > sum(lengths) else []
            row = PackedRows.from_lists(ids[None], [lengths + padding], [[]])
            with session.run.processes.accelerator.autocast():
                hidden = hidden_states(lm, Collator(row).batch(np.arange(1)))
                return find_head(lm).compute_logits(hidden[0, chosen]).float()

        for start, end in pairwise(np.cumsum([0, *lengths]).tolist()):
            among_others, first = (ids + 1) % SIZES[work.model].facts.vocab_size, 0 * ids
            among_others[start:end] = first[: end - start] = ids[start:end]
            packed = logits(ids, lengths, slice(start, end))
            there = logits(among_others, lengths, slice(start, end))
            alone = logits(first, [end - start], slice(end - start))
            found.append([x.abs().max() for x in (packed - there, packed - alone, alone)])
    # Not max(), which may drop a NaN.
    moved, apart, largest = torch.tensor(found).amax(0).tolist()
    tolerance = 1e-4 if plan.precision == "fp32" else 0.05
    figures = {"n_documents": len(lengths), "moved_by_others": moved, "apart": apart / largest}
    passed = moved == 0 and apart <= tolerance * largest
    return {"passed": passed, "figures": {**figures, "tolerance": tolerance}}


PARTS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "ceilings": measure_ceilings,
    **{name: partial(train, variant=variant, name=name) for name, variant in VARIANTS.items()},
    **{name: partial(time_peer, name=name) for name in PEERS},
    "resume": same_weights_after_resume,
    "packing": packed_as_alone,
}


def run(name: str, work: Work) -> dict[str, Any]:
    """Run a part; out of memory is a result."""
    if work.device == "cpu":
        # One thread: more do not help a tiny model, and slow it down on a busy machine.
        torch.set_num_threads(1)
    part = prepare if name == "prepare" else PARTS[name]
    try:
        return part(work)
    except (OutOfMemory, torch.OutOfMemoryError, HardwareError) as error:
        return {"out_of_memory": " ".join(str(error).split())[:300]}
