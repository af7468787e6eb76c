"""A made-up profile of five steps on a card, with names as compilers make them; and one of none."""

from expertflow.train.profile.kernels import N_KERNELS, Span, kernel_table
from expertflow.train.profile.profiler import NOT_ASKED
from expertflow.train.records import Kernel, KernelProfile

NAMES = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": 41_000.0,
    "void cutlass::device_kernel<flash::FlashAttnBwdSm90<(int)128, A & B>>(Params)": 22_000.0,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>": 9_000.0,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": 7_500.0,
    "Memcpy DtoD (Device -> Device)": 1_200.0,
    **{f"triton_poi_fused_mul_silu_{i}": 100.0 + i for i in range(20)},
}


def make_profile() -> KernelProfile:
    spans, now_us = [], 0.0
    for name, taken_us in NAMES.items():
        for _ in range(5):
            spans.append(
                Span(name=name, start_us=now_us, end_us=now_us + taken_us, self_us=taken_us)
            )
            now_us += taken_us / 0.9
    table = kernel_table(spans)
    return KernelProfile(
        n_wanted_steps=5, n_steps=5, first_step=12, device="cuda", wall_s=now_us / 1e6,
        n_neighbour_steps=5, neighbour_step_s=now_us / 6e6, pause_s=3.4, device_busy_fraction=0.9,
        n_kernels=len(table), kernels_s=sum(kernel.total_s for kernel in table),
        kernels=table[:N_KERNELS], rest=Kernel(name="", n_calls=0, total_s=0.0),
        trace="trace.json.gz", n_trace_bytes=11_000_000, reason=None, unavailable={}, notes=(),
    )  # fmt: skip


def not_profiled(reason: str = NOT_ASKED) -> KernelProfile:
    return KernelProfile(n_wanted_steps=0, device="cpu", reason=reason)
