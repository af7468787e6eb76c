"""Kernels are sorted by their names."""

import pytest
from made_up_profile import make_profile
from msgspec.structs import replace

from expertflow.report.profile import by_kind, kind_of, sorted_kernels
from expertflow.train.records import Kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "communication"),
        ("c10d::allreduce_", "communication"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_Copy>", "matmul"),
        ("triton_tem_fused_mm_12", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimiser"),
        ("aten::_fused_adamw_", "optimiser"),
        ("_ChunkedLossBackward", "loss"),
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
    kinds = [(kind.kind, kind.n_calls, kind.share_fraction) for kind in by_kind(profile)]
    assert kinds == [("matmul", 3, 0.7), ("attention", 1, 0.15), ("other", 7, 0.15)]
    longest = sorted_kernels(profile, 2)
    assert [(kernel.kind, kernel.share_fraction) for kernel in longest] == [
        ("matmul", 0.6), ("attention", 0.15)
    ]  # fmt: skip
    assert len(longest[0].name) == 300
