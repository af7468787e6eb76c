"""Summarize a profile: kernels grouped by purpose, and the time that profiling cost."""

from collections import defaultdict

from msgspec.structs import asdict, replace

from expertflow.report.records import KernelKind, Report, SortedKernel
from expertflow.report.run_records import Time
from expertflow.train.records import Kernel, KernelProfile

# Lower-case name fragments and their kinds, in order of precedence: an attention kernel consists of
# matrix products, and a fused kernel has all its parts in its name. The training loss runs as
# matrix products and elementwise kernels and counts as those; the loss kind catches kernels of
# other implementations.
KINDS = (
    ("communication", ("nccl", "c10d::", "gloo:", "all_reduce", "allreduce", "all_gather",
                       "allgather", "reduce_scatter", "fsdp::")),
    ("attention", ("flash", "fmha", "varlen", "attention", "sdpa", "scaled_dot_product",
                   "scaleddotproduct")),
    ("matmul", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "tem_fused_mm",
                "tem_fused_addmm", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear",
                "mkl_linear")),
    ("optimizer", ("multi_tensor_apply", "adam", "_foreach_", "optimizer")),
    ("loss", ("chunkedloss", "cross_entropy", "crossentropy", "nll_loss", "log_softmax",
              "logsoftmax")),
    ("elementwise", ("triton_", "cpp_fused")),
    ("copies", ("memcpy", "memset", "copy_kernel", "copy_device_to_device", "catarray",
                "aten::copy_", "aten::cat", "aten::fill_", "aten::zero_")),
    ("elementwise", ("elementwise", "vectorized", "reduce_kernel", "norm", "dropout", "softmax",
                     "aten::add", "aten::sub", "aten::mul", "aten::div", "aten::neg", "aten::silu",
                     "aten::sigmoid", "aten::exp", "aten::log", "aten::pow", "aten::rsqrt",
                     "aten::mean", "aten::sum", "aten::amax", "aten::bernoulli", "aten::where",
                     "aten::cos", "aten::sin")),
)  # fmt: skip
REST = "other"
N_CHARS = 300


def kind_of(name: str) -> str:
    """Return the kind of a kernel.

    >>> kind_of("ampere_bf16_s16816gemm_bf16_128x64"), kind_of("aten::embedding")
    ('matmul', 'other')
    """
    low = name.lower()
    return next((kind for kind, parts in KINDS if any(part in low for part in parts)), REST)


def list_kernels(profile: KernelProfile, n: int) -> tuple[SortedKernel, ...]:
    return tuple(
        SortedKernel(
            name=kernel.name[:N_CHARS], **asdict(_sum(kind_of(kernel.name), [kernel], profile))
        )
        for kernel in profile.kernels[:n]
    )


def sum_by_kind(profile: KernelProfile) -> tuple[KernelKind, ...]:
    """Sum a profile by kind, longest first."""
    groups: defaultdict[str, list[Kernel]] = defaultdict(list)
    for kernel in profile.kernels:
        groups[kind_of(kernel.name)].append(kernel)
    # Equal times go by name, so that the report is reproducible.
    kinds = [_sum(kind, group, profile) for kind, group in groups.items()]
    return tuple(sorted(kinds, key=lambda kind: (-kind.total_s, kind.kind)))


def _sum(kind: str, kernels: list[Kernel], profile: KernelProfile) -> KernelKind:
    total_s = sum(kernel.total_s for kernel in kernels)
    all_s = sum(kernel.total_s for kernel in profile.kernels)
    n_calls = sum(kernel.n_calls for kernel in kernels)
    share = total_s / all_s if all_s else 0.0
    return KernelKind(kind=kind, n_calls=n_calls, total_s=total_s, share_fraction=share)


def time_without_profile(report: Report) -> Time:
    """Return the parts of wall time without the wait for a profile, which the user requested."""
    time = report.time
    paused_s = report.profile.pause_s if report.profile else 0.0
    # The wait is part of other_s; rounding must not make that negative.
    waited_s = min(paused_s, max(0.0, time.other_s))
    return replace(time, other_s=time.other_s - waited_s, wall_s=time.wall_s - waited_s)
