"""Run the extension's kernels on tensors of many sizes, for compute-sanitizer.

compute-sanitizer python -m tests.gpu.sanitized
"""

from __future__ import annotations

import torch

from minidp import native

SIZES = [*range(35), 255, 256, 257, 2047, 2048, 2049, 9001, *[7] * 130]
DONE = "all kernels have run"

if __name__ == "__main__":
    kernels = native.library()
    assert kernels is not None
    assert kernels.kernels_for == "cuda"
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        grads = [torch.ones(n, dtype=dtype, device="cuda:0") for n in SIZES]
        buffer = torch.zeros(sum(SIZES), dtype=dtype, device="cuda:0")
        views = list(buffer.split(SIZES))
        for scale in (1.0, 1 / 3):
            kernels.flatten(views, grads, scale)
            kernels.unflatten(grads, views)
    torch.cuda.synchronize()
    print(DONE)  # noqa: T201 -- the test looks for it
