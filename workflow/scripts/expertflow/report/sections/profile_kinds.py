"""Sort kernels by what they are for, by their names, and sum them up."""

from collections import defaultdict

from expertflow.core.records import Record
from expertflow.train.records import Kernel, KernelProfile

# Parts of lower-case names and their kinds, in the order in which they are looked for: a kernel of
# attention is made of matrix products, and one that the compiler fused has all its parts in its
# name. The loss of training is of matrix products and elementwise kernels and counts as these;
# under its own name comes what other implementations launch.
KINDS = (
    ("communication", ("nccl", "c10d::", "gloo:", "all_reduce", "allreduce", "all_gather",
                       "allgather", "reduce_scatter", "fsdp::")),
    ("attention", ("flash", "fmha", "varlen", "attention", "sdpa", "scaled_dot_product",
                   "scaleddotproduct")),
    ("matmul", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "tem_fused_mm",
                "tem_fused_addmm", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear",
                "mkl_linear")),
    ("optimiser", ("multi_tensor_apply", "adam", "_foreach_", "optimizer", "optimiser")),
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


class SortedKernel(Record, frozen=True, kw_only=True):
    """All launches of one kernel; the share is of the time of all kernels."""

    name: str
    kind: str
    n_calls: int
    total_s: float
    share_fraction: float


class KernelKind(Record, frozen=True, kw_only=True):
    """All kernels of one kind."""

    kind: str
    n_calls: int
    total_s: float
    share_fraction: float


def kind_of(name: str) -> str:
    """Name the kind of a kernel.

    >>> kind_of("ampere_bf16_s16816gemm_bf16_128x64"), kind_of("aten::embedding")
    ('matmul', 'other')
    """
    low = name.lower()
    return next((kind for kind, parts in KINDS if any(part in low for part in parts)), REST)


def sorted_kernels(profile: KernelProfile, n: int) -> list[SortedKernel]:
    """Give the longest kernels of a profile with their kinds."""
    return [
        SortedKernel(
            name=kernel.name[:N_CHARS],
            kind=kind_of(kernel.name),
            n_calls=kernel.n_calls,
            total_s=kernel.total_s,
            share_fraction=_share(kernel.total_s, profile),
        )
        for kernel in profile.kernels[:n]
    ]


def by_kind(profile: KernelProfile) -> list[KernelKind]:
    """Sum a profile up by kind, the longest first; what has no name counts as other."""
    groups: defaultdict[str, list[Kernel]] = defaultdict(list)
    for kernel in profile.kernels:
        groups[kind_of(kernel.name)].append(kernel)
    if profile.rest.n_calls:
        groups[REST].append(profile.rest)
    kinds = []
    for kind, group in groups.items():
        total_s = sum(kernel.total_s for kernel in group)
        n_calls, share = sum(kernel.n_calls for kernel in group), _share(total_s, profile)
        kinds.append(KernelKind(kind=kind, n_calls=n_calls, total_s=total_s, share_fraction=share))
    return sorted(kinds, key=lambda kind: (-kind.total_s, kind.kind))


def _share(total_s: float, profile: KernelProfile) -> float:
    return total_s / profile.kernels_s if profile.kernels_s else 0.0
