"""Tell a want of memory on the device from other errors, whoever asked for it in vain."""

import torch

# What is said where it is not torch's allocator: cuBLAS, Triton, NCCL, and CUDA as it loads a
# kernel, ask the driver, which has nothing left once torch holds it all.
SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_short(error: RuntimeError) -> bool:
    """Tell whether an error is for want of memory on the device."""
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in SAID)
