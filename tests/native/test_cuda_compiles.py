"""The GPU kernel, as far as a machine without a GPU can tell.

It compiles; its blocks cover every element once; and its per-thread code, run on the
CPU one thread after the other, has torch's bits. tests/gpu runs it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidp.native.binary import FLAGS, NVCC_FLAGS
from tests.native.test_flatten import GUARD, REALS, SCALES, assert_same_bits

CSRC = Path(__file__).parents[2] / "csrc"
TORCH_HEADERS = Path(torch.__file__).parent / "include"
NVCC, GXX = shutil.which("nvcc"), shutil.which("g++")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++")


def toolkit_headers() -> Path | None:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [str(Path(NVCC).resolve().parents[1])] if NVCC else []
    for root in [*roots, "/usr/local/cuda"]:
        if root and (Path(root) / "include" / "cuda_fp16.h").is_file():
            return Path(root) / "include"
    return None


TOOLKIT_HEADERS = toolkit_headers()


def compile_or_fail(*command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@needs_nvcc
@pytest.mark.slow
def test_the_kernels_compile_without_a_warning(tmp_path):
    archs = compile_or_fail(NVCC, "--list-gpu-arch").split()
    oldest = min(archs, key=lambda arch: int(arch.removeprefix("compute_")))
    # There is no GPU here whose architecture could be asked.
    flags = [flag for flag in NVCC_FLAGS if flag != "-arch=native"]
    assert len(flags) == len(NVCC_FLAGS) - 1
    compile_or_fail(
        *[NVCC, *flags, "-c", CSRC / "cuda" / "launch.cu"],
        *["-o", tmp_path / "launch.o", "-Werror", "all-warnings"],
        *["-Xcompiler", "-Wall,-Wextra,-Werror"],
        *["-gencode", "arch=compute_90,code=sm_90"],
        *["-gencode", f"arch={oldest},code={oldest.replace('compute', 'sm')}"],
    )


@needs_nvcc
@pytest.mark.slow
def test_a_thread_moves_16_bytes_at_once(tmp_path):
    code = tmp_path / "launch.ptx"
    compile_or_fail(
        *[NVCC, "-std=c++17", "-O3", "--fmad=false", "-ptx", "-arch=sm_90"],
        *[CSRC / "cuda" / "launch.cu", "-o", code],
    )
    _, *kernels = code.read_text().split(".entry")
    assert len(kernels) == 4  # one for each dtype
    for kernel in kernels:
        assert re.search(r"ld\.global\.(v4\.\w32|v2\.\w64)", kernel)
        assert re.search(r"st\.global\.(v4\.\w32|v2\.\w64)", kernel)


@needs_gxx
@pytest.mark.slow
def test_what_knows_of_cuda_and_torch_compiles_without_a_warning():
    if not (TORCH_HEADERS / "c10" / "cuda" / "CUDAStream.h").is_file():
        pytest.skip("this torch comes without the headers of c10/cuda")
    if TOOLKIT_HEADERS is None:
        pytest.skip("no headers of a CUDA toolkit")
    torch_api = TORCH_HEADERS / "torch" / "csrc" / "api" / "include"
    python = sysconfig.get_path("include")
    headers = [TORCH_HEADERS, torch_api, python, TOOLKIT_HEADERS]
    compile_or_fail(
        *[GXX, *FLAGS, "-fsyntax-only", "-Wextra", "-Werror"],
        # A torch without CUDA lacks one generated header; it only sets export macros.
        "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
        *[word for path in headers for word in ("-isystem", path)],
        CSRC / "cuda" / "copy_rows.cpp",
    )


# --------------------------------------------------------------------------- blocks

ROW = np.dtype([(name, "i8") for name in ("to", "from", "numel", "first_block")])


class Run(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("num_launches", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("most_rows", ctypes.c_int64),
    ]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The host version of the kernel, as a shared library."""
    if GXX is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("host") / "host_check.so"
    headers = ["-isystem", TOOLKIT_HEADERS] if TOOLKIT_HEADERS else []
    compile_or_fail(
        *[GXX, "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", *headers],
        *["-Wall", "-Wextra", "-Werror", "-I", CSRC / "cuda"],
        *[Path(__file__).with_name("host_check.cpp"), "-o", library],
    )
    loaded = ctypes.CDLL(str(library))
    loaded.elements_per_block.restype = ctypes.c_int64
    return loaded


def blocks_of(host, numels):
    """The run, and of each block its tensor and where in it the block begins."""
    rows = np.zeros(len(numels), ROW)
    rows["to"], rows["numel"] = range(len(numels)), numels
    count = sum(-(-n // host.elements_per_block()) for n in numels)
    tags, begins = np.zeros(count, np.int64), np.zeros(count, np.int64)
    run = Run(rows.ctypes.data, len(rows), 1.0, 0, 0, 0)
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (tags, begins))
    host.plan(ctypes.byref(run), *arrays)
    assert run.num_blocks == count
    return run, tags, begins


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 70), st.integers(0, 40_000)), max_size=300))
@example([2047, 2048, 2049, 0, 1, 4096])
@example([0, 0])
def test_every_tensor_has_as_many_blocks_as_it_needs(host, numels):
    run, tags, begins = blocks_of(host, numels)
    per_block = host.elements_per_block()
    expected = [
        (k, begin) for k, n in enumerate(numels) for begin in range(0, n, per_block)
    ]
    assert list(zip(tags.tolist(), begins.tolist(), strict=True)) == expected
    filled = sum(n > 0 for n in numels)
    assert run.num_launches == -(-filled // host.rows_per_launch())
    assert run.most_rows <= host.rows_per_launch()


def test_one_huge_tensor_of_more_than_32_bits(host):
    numel = 5 * 2**31 + 1
    _, tags, begins = blocks_of(host, [3, numel])
    assert begins.max() == numel - 1
    assert (np.diff(begins[1:]) == host.elements_per_block()).all()
    assert tags.tolist()[:2] == [0, 1]


# --------------------------------------------------------------------------- copies

LETTERS = dict(zip(REALS, "fdbh", strict=True))
NUMELS = [*range(35), 255, 256, 257, 2047, 2048, 2049, 0, 9001, *[7] * 120]
dtypes = pytest.mark.parametrize("dtype", REALS, ids=lambda d: str(d)[6:])


@pytest.fixture(scope="module")
def copy(host):
    """``copy(to, of, scale)`` -> `Run`; lists of tensors."""
    if not hasattr(host, "copy"):
        pytest.skip("no headers of a CUDA toolkit")
    host.copy.argtypes = [ctypes.c_char, ctypes.c_void_p]

    def call(to, of, scale):
        rows = np.zeros(len(to), ROW)
        rows["to"] = [tensor.data_ptr() for tensor in to]
        rows["from"] = [tensor.data_ptr() for tensor in of]
        rows["numel"] = [tensor.numel() for tensor in to]
        run = Run(rows.ctypes.data, len(rows), scale, 0, 0, 0)
        host.copy(LETTERS[to[0].dtype].encode(), ctypes.byref(run))
        return run

    return call


def any_bits(numel, dtype):
    """All kinds of values: every second one ordinary, the others any bit pattern."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    values = raw.view(dtype)
    values[::2] = torch.randn(len(values[::2]), dtype=torch.float64).to(dtype)
    return values


@dtypes
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("places", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
def test_a_copy_has_torchs_bits(copy, host, dtype, scale, places):
    """Also in place, where an element that is scaled twice would show.

    Vectors of 16 bytes are moved only where both tensors begin at a multiple of that.
    """
    before, after = places  # elements, from such an address on
    of = [any_bits(n + before, dtype)[before:] for n in NUMELS]
    if dtype.itemsize == 2:  # all numbers: ties are rounded specially
        of[-1] = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    rooms = [torch.full((after + len(each) + GUARD,), 42.0, dtype=dtype) for each in of]
    to = [room[after:-GUARD] for room in rooms]
    run = copy(to, of, scale)
    assert run.num_launches == -(-(len(NUMELS) - NUMELS.count(0)) // 120)
    assert run.most_rows == host.rows_per_launch() == 120
    for found, source in zip(to, of, strict=True):
        assert_same_bits(found, source if scale == 1 else source * scale)
        if scale == 1:  # also those of a NaN
            assert torch.equal(found.view(torch.uint8), source.view(torch.uint8))
    assert all((room[-GUARD:] == 42).all() for room in rooms)
    assert all((room[:after] == 42).all() for room in rooms)
    copy(of, of, scale)
    for found, expected in zip(of, to, strict=True):
        assert_same_bits(found, expected)
