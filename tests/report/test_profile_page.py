"""Kernels of a profile: their kinds, and the section on the page."""

from typing import Any

import pytest
from made_up_runs import CPU, GPU
from made_up_series import make_profile, not_profiled
from msgspec.structs import replace

from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.page import render_page
from expertflow.report.profile import kind_of, list_kernels, sum_by_kind
from expertflow.report.records import Report
from expertflow.train.records import Kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "communication"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_Copy>", "matmul"),
        ("triton_tem_fused_mm_12", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("void cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue, log_softmax>", "loss"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "elementwise"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda(Iterator&)>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<...>>", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::as_strided", "other"),
    ],
)  # fmt: skip
def test_kind_of_a_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_are_summed_by_kind_and_those_without_a_name_are_other() -> None:
    table = (
        Kernel(name="gemm" + "x" * 400, n_calls=2, total_s=60.0),
        Kernel(name="flash", n_calls=1, total_s=15.0),
        Kernel(name="nvjet", n_calls=1, total_s=10.0),
    )
    rest = Kernel(name="", n_calls=7, total_s=15.0)
    profile = replace(make_profile(), kernels=table, rest=rest, kernels_s=100.0)
    kinds = [(kind.kind, kind.n_calls, kind.share_fraction) for kind in sum_by_kind(profile)]
    assert kinds == [("matmul", 3, 0.7), ("attention", 1, 0.15), ("other", 7, 0.15)]
    longest = list_kernels(profile, 2)
    shares = [(kernel.kind, kernel.share_fraction) for kernel in longest]
    assert shares == [("matmul", 0.6), ("attention", 0.15)]
    assert len(longest[0].name) == 300


def page_of(**changes: Any) -> tuple[Report, str]:
    inputs = replace(GPU.short, **changes)
    report = build_report(inputs, {})
    check_report(report, inputs)
    return report, render_page(report, inputs)


def test_kernels_are_shown_where_there_are_some() -> None:
    assert CPU.report.unavailable["profile"] == "training.profile_steps is 0"
    assert 'id="kernels"' not in CPU.page
    _, page = page_of(profile=not_profiled("no CUPTI <here>"))
    assert "Kernels were not profiled: no CUPTI &lt;here&gt;." in page


def test_what_a_profile_lacks_is_said() -> None:
    missing = {"trace": "it is too large", "n_trace_bytes": "it is too large",
               "neighbor_step_s": "none came before", "device_busy_fraction": "a CPU"}  # fmt: skip
    few = ("at most 2 of the 5 steps asked for",)
    changes = {"device": "cpu", "n_neighbor_steps": 0, "unavailable": missing, "notes": few}
    report, page = page_of(profile=replace(make_profile(), **changes, **dict.fromkeys(missing)))
    assert report.unavailable["profile.overhead_fraction"] == "none came before"
    assert report.unavailable["profile.trace"] == "it is too large"
    for text in ("No trace: it is too large.", "that each spent itself", "<th>operator</th>",
                 "At most 2 of the 5 steps asked for.", "Longest operators"):  # fmt: skip
        assert text in page
