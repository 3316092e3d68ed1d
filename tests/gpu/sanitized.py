"""Run the extension's kernels on tensors of many sizes, for compute-sanitizer.

compute-sanitizer python -m tests.gpu.sanitized
compute-sanitizer python -m tests.gpu.sanitized --beyond    reads beyond a tensor
"""

from __future__ import annotations

import sys

import torch

from minidp import native

SIZES = [*range(20), 255, 256, 257, 2047, 2048, 2049, 9001, *[7] * 130]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DONE = "all kernels have run"


def copy_all(device: torch.device) -> None:
    """Into a buffer, and out again."""
    kernels = native.library()
    assert kernels is not None
    assert kernels.has_cuda
    for dtype in DTYPES:
        grads = [torch.ones(n, dtype=dtype, device=device) for n in SIZES]
        buffer = torch.zeros(sum(SIZES), dtype=dtype, device=device)
        views = list(buffer.split(SIZES))
        for scale in (1.0, 1 / 3):
            kernels.flatten(views, grads, scale)
            kernels.unflatten(grads, views)
    torch.cuda.synchronize()


def read_beyond(device: torch.device) -> None:
    """What the sanitizer has to find: a gradient whose memory has become less."""
    kernels = native.library()
    assert kernels is not None
    grad, view = (torch.ones(1 << 16, device=device) for _ in range(2))
    grad.untyped_storage().resize_(1024)
    kernels.flatten([view], [grad], 1.0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    run = read_beyond if "--beyond" in sys.argv else copy_all
    run(torch.device("cuda", 0))
    print(DONE)  # noqa: T201 -- the test looks for it
