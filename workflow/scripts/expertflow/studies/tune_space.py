"""Say what there is to try for a plan on this machine, and put a choice into the plan."""

from msgspec.structs import asdict, replace

from expertflow.hardware.probe import probe_machine
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import USABLE_FRACTION, PlanSpec, TrainPlan
from expertflow.plan.tuned import TunedSettings, free_settings, settings_of
from expertflow.studies.search import Space

# Routes of attention besides the one that reads where documents end.
MASKED = ("flex", "sdpa")
N_WORKERS = (0, 2, 4, 8)
# Why a choice is not tried, by its setting.
ON_CPU = {
    "gradient_checkpointing": "it computes again to spare memory, which a CPU has more of",
    "torch_compile": "compiling would take most of the search's time",
    "attention": "it computes what the mask hides, and document by document does not",
}
SAME_KERNEL = "packed calls the same kernel where it runs"


def space_of(draft: PlanDraft, plan: TrainPlan) -> Space:
    """Give what may be tried; what the manifest names stays as it is."""
    default, free = settings_of(plan), free_settings(draft.spec)
    gpu, is_packed = draft.gpu, draft.packing.packing != "none"
    machine = probe_machine(table=[])
    n_cpus = machine.n_cpus_usable
    workers = [n for n in N_WORKERS if n <= n_cpus and n != default.dataloader_num_workers]
    space = Space(
        default=default,
        free=free,
        on_card=gpu is not None,
        n_workers=tuple(workers) if "loader" in free and not is_packed else (),
    )
    if gpu is None:
        threads = threads_to_try(n_cpus, machine.n_cpus_physical) if "n_threads" in free else ()
        return replace(space, n_threads=threads, left_out=_not_on_cpu(default, free))
    total, may_route = gpu.memory_total_bytes, "attention" in free
    return replace(
        space,
        usable_bytes=None if total is None else int(USABLE_FRACTION * total),
        attentions=MASKED if may_route else (),
        may_compile="torch_compile" in free and is_packed and plan.method != "qlora",
        left_out=((replace(default, attention="varlen"), SAME_KERNEL),) if may_route else (),
    )


def _not_on_cpu(
    default: TunedSettings, free: frozenset[str]
) -> tuple[tuple[TunedSettings, str], ...]:
    others = {
        "gradient_checkpointing": replace(default, gradient_checkpointing=True),
        "torch_compile": replace(default, torch_compile=True),
        "attention": replace(default, attention="sdpa"),
    }
    return tuple(
        (other, f"not tried on a CPU: {ON_CPU[name]}")
        for name, other in others.items()
        if name in free and other != default
    )


def threads_to_try(n_usable: int, n_physical: int | None) -> tuple[int, ...]:
    """Give powers of two up to what this process may use, that itself, and the physical cores."""
    powers = {1 << i for i in range(n_usable.bit_length()) if 1 << i <= n_usable}
    return tuple(sorted(powers | {n_usable, min(n_physical or n_usable, n_usable)}))


def with_settings(plan: TrainPlan, settings: TunedSettings, spec: PlanSpec) -> TrainPlan:
    """Put a choice into a plan; its cost and predictions are no longer of it."""
    n_workers = settings.dataloader_num_workers
    inline = settings.loader == "workers" and not n_workers
    return replace(
        plan,
        **asdict(settings),
        dataloader_prefetch_factor=0 if inline else spec.dataloader_prefetch_factor,
        dataloader_persistent_workers=spec.dataloader_persistent_workers and n_workers > 0,
    )
