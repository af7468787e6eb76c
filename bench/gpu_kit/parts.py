"""The parts of the kit by name, most valuable first."""

import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
import torch

from expertflow.core.errors import HardwareError
from expertflow.core.records import to_json
from expertflow.plan.flops import CONVENTION, linear_weights
from expertflow.train.memory import OutOfMemory
from expertflow.train.processes import start_processes
from gpu_kit.ceilings import ceilings
from gpu_kit.checks import CHECKS
from gpu_kit.fixtures import LENGTHS_WORDS, SIZES, make_model, make_rows
from gpu_kit.kernels import profile_calls
from gpu_kit.peers import PEERS, time_peer
from gpu_kit.training import WARM_UP, Session, Variant, Work, plan_of, train

PADDED_ROWS = 4
PROFILED_STEPS = 3


def _variants(method: str) -> dict[str, Variant]:
    usual = partial(Variant, method=method)
    return {
        method: usual(),
        f"{method}-padded": usual(
            packing="none", all_rows_loss=True, micro_batch=PADDED_ROWS,
            changes={"attention": "sdpa", "torch_compile": False, "optim": "adamw_torch",
                     "group_by_length": False},
        ),
        f"{method}-no-compile": usual(changes={"torch_compile": False}),
        f"{method}-all-rows-loss": usual(all_rows_loss=True),
        f"{method}-sdpa-mask": usual(changes={"attention": "sdpa"}),
        f"{method}-checkpointing": usual(flip_checkpointing=True),
    }  # fmt: skip


VARIANTS = {
    **_variants("lora"),
    **_variants("full"),
    "dora": Variant(use_dora=True),
    "qlora": Variant(method="qlora"),
}


def prepare(work: Work) -> dict[str, Any]:
    """Write model and rows; describe the machine."""
    cuda = work.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise HardwareError("--device cuda: torch sees no CUDA device; use --device cpu")
    size = SIZES[work.model]
    facts = size.facts
    needed = 2 * (linear_weights(facts) + 2 * facts.hidden_size * facts.vocab_size)
    free = shutil.disk_usage(work.folder).free
    if free < 2 * needed:
        raise HardwareError(
            f"{work.folder}: {free / 1e9:.0f} GB free, model and checkpoints need"
            f" {2 * needed / 1e9:.0f} GB; choose another --scratch"
        )
    sizes = make_model(work.folder / "model", work.model, device=work.device)
    packings = {kind: make_rows(work.folder / kind, work.model, packing=kind) for kind in
                ("bfd", "none")}  # fmt: skip
    split = packings["bfd"].train
    return {
        "sizes": sizes,
        "packings": {kind: to_json(packing) for kind, packing in packings.items()},
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
            "n_rows_unpacked": packings["none"].train.n_sequences,
            "mean_document_tokens": split.n_tokens / split.n_documents,
            "sum_len_sq_over_sum_len": split.sum_len_sq / split.n_tokens,
            "supervised_share": split.n_target_tokens / split.n_tokens,
            "padding_share": 1 - split.n_tokens / (split.n_sequences * size.row_length),
        },
        "convention": CONVENTION,
    }


def measure_ceilings(work: Work) -> dict[str, Any]:
    """Measure products and copies; add the card's peaks."""
    gpu = work.gpu()
    size = SIZES[work.model]
    found = ceilings(size.facts, work.device, tokens=16 * size.row_length)
    return {
        **found,
        "peak_bf16_flops_per_s": gpu.peak_bf16_flops_per_s if gpu else None,
        "peak_bandwidth_bytes_per_s": gpu.peak_bandwidth_bytes_per_s if gpu else None,
        "peak_source": gpu.source if gpu else "the peak of a CPU is not known",
    }


def profile_steps(work: Work) -> dict[str, Any]:
    variant = Variant()
    plan = plan_of(work, variant)
    session = Session(work, variant, plan, name="profile", processes=start_processes(plan))
    try:
        for _ in range(WARM_UP + 2):
            session.step()
        return profile_calls(session.step, work.device, n_steps=PROFILED_STEPS)
    finally:
        session.close()


def check(name: str, work: Work) -> dict[str, Any]:
    return msgspec.structs.asdict(CHECKS[name](work))


PARTS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "ceilings": measure_ceilings,
    "route": partial(check, "route"),
    **{name: partial(train, variant=variant, name=name) for name, variant in VARIANTS.items()},
    **{name: partial(time_peer, name=name) for name in PEERS},
    "packed": partial(check, "packed"),
    "resume": partial(check, "resume"),
    "profile": profile_steps,
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
