"""In which number format matrix products are computed on a device, given the format they are stored in.

Decided once, when a layer is built, from device and dtype. A CPU without bf16 (or fp16) instructions multiplies low-
precision matrices 7 to 100 times slower than fp32 ones, and sums them in low precision; there the operands are
widened, the product is fp32 and its result is rounded once.
"""

from __future__ import annotations

import torch

WIDENED_BYTES = 2 << 20
"""Most that an operand or a result takes in the wider format at a time: larger ones are multiplied in blocks of rows.
What is freed at once stays small, so that what lives until backward does not end up scattered between large holes."""


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for `dtype`."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The format to multiply in: `dtype` itself, or fp32 on a CPU that cannot."""
    return torch.float32 if device.type == "cpu" and not cpu_multiplies(dtype) else dtype


def row_blocks(num_rows: int, row_length: int) -> list[slice]:
    """Cut rows of `row_length` numbers into blocks of WIDENED_BYTES in fp32, one row at least."""
    size = max(1, WIDENED_BYTES // (4 * max(1, row_length)))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
