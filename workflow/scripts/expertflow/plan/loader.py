"""Choose what brings batches to the trainer, and in which order."""

from typing import Any

from expertflow.plan.records import PlanSpec, Reason, make_reason
from expertflow.plan.settings import Loader


def choose_loader(spec: PlanSpec, packing: str) -> tuple[dict[str, Any], tuple[Reason, ...]]:
    """Resolve the loader's settings: one thread, unless workers are asked for where they help."""
    kind, reason = _kind(spec, packing)
    n_workers = spec.dataloader_num_workers if kind == "workers" else 0
    inline = kind == "workers" and not n_workers
    workers = (
        spec.told("dataloader_num_workers")
        if kind == "workers"
        else _unused("dataloader_num_workers", spec.dataloader_num_workers, "the thread needs none")
    )
    prefetch = (
        "no workers: every batch is made when it is asked for"
        if inline
        else spec.told("dataloader_prefetch_factor")
    )
    persistent = (
        spec.told("dataloader_persistent_workers")
        if n_workers
        else "there are no worker processes to keep from one epoch to the next"
    )
    chosen: dict[str, tuple[object, str]] = {
        "loader": (kind, reason),
        "dataloader_num_workers": (n_workers, workers),
        "dataloader_prefetch_factor": (0 if inline else spec.dataloader_prefetch_factor, prefetch),
        "dataloader_persistent_workers": (
            spec.dataloader_persistent_workers and n_workers > 0, persistent,
        ),
    }  # fmt: skip
    values = {name: value for name, (value, _) in chosen.items()}
    return values, tuple(make_reason(name, value, why) for name, (value, why) in chosen.items())


def choose_grouping(spec: PlanSpec, packing: str) -> tuple[bool, Reason]:
    """Group rows by length where rows differ in length."""
    value = spec.group_by_length and packing == "none"
    if packing != "none":
        reason = f"packing {packing}: rows are all of one length"
    else:
        reason = spec.told("group_by_length")
    return value, make_reason("group_by_length", value, reason)


def _kind(spec: PlanSpec, packing: str) -> tuple[Loader, str]:
    n_workers = spec.dataloader_num_workers
    if spec.loader is not None:
        return spec.loader, spec.told("loader")
    if packing != "none":
        reason = "one thread: packed rows need no worker processes, measured slower with them"
        return "thread", reason
    if n_workers:
        return "workers", f"unpacked rows, and dataloader_num_workers is {n_workers}"
    return "thread", "one thread: no dataloader_num_workers are asked for"


def _unused(key: str, value: int, reason: str) -> str:
    return f"{reason}; {key} {value} is not used" if value else reason
