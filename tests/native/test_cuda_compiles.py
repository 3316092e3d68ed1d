"""The GPU kernel, as far as a machine without a GPU can tell.

It compiles; its blocks cover every element once; and its per-thread code, run on the
CPU one thread after the other, has torch's bits. tests/gpu runs it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidp.native._recipe import FLAGS, NVCC_FLAGS

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES = Path(__file__).parents[2] / "csrc"
CUDA_SOURCES = SOURCES / "cuda"
TORCH_HEADERS = Path(torch.__file__).parent / "include"
NVCC = shutil.which("nvcc")
GXX = shutil.which("g++")
LOADS = 8  # of a thread, as in rows.h


def toolkit_headers() -> Path | None:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [str(Path(NVCC).resolve().parents[1])] if NVCC else []
    for root in [*roots, "/usr/local/cuda"]:
        if root and (Path(root) / "include" / "cuda_fp16.h").is_file():
            return Path(root) / "include"
    return None


TOOLKIT_HEADERS = toolkit_headers()

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++")
needs_toolkit_headers = pytest.mark.skipif(
    TOOLKIT_HEADERS is None, reason="no headers of a CUDA toolkit"
)
needs_torch_headers = pytest.mark.skipif(
    not (TORCH_HEADERS / "c10" / "cuda" / "CUDAStream.h").is_file(),
    reason="this torch comes without the headers of c10/cuda",
)


def compile_or_fail(*command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


# ------------------------------------------------------------------------ compilers

# Of the build, but for the GPU: there is none whose architecture could be asked.
FLAGS_OF_BUILD = [flag for flag in NVCC_FLAGS if flag != "-arch=native"]


@needs_nvcc
@pytest.mark.slow
def test_the_kernels_compile_without_a_warning(tmp_path):
    archs = compile_or_fail(NVCC, "--list-gpu-arch").split()
    oldest = min(archs, key=lambda arch: int(arch.removeprefix("compute_")))
    assert "-arch=native" in NVCC_FLAGS
    compile_or_fail(
        *[NVCC, *FLAGS_OF_BUILD, "-c", CUDA_SOURCES / "launch.cu"],
        *["-o", tmp_path / "launch.o", "-Werror", "all-warnings"],
        *["-Xcompiler", "-Wall,-Wextra,-Werror"],
        *["-gencode", "arch=compute_90,code=sm_90"],
        *["-gencode", f"arch={oldest},code={oldest.replace('compute', 'sm')}"],
    )


def kernels_in(ptx: str) -> dict[str, str]:
    """Mangled name -> body."""
    pieces = re.split(r"\.entry (\w+)", ptx)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


@needs_nvcc
@pytest.mark.slow
def test_every_load_is_issued_before_the_first_store(tmp_path):
    """And values stay in registers; addresses are known to be of global memory."""
    ptx = tmp_path / "launch.ptx"
    compile_or_fail(
        *[NVCC, *FLAGS_OF_BUILD, "-ptx", "-arch=compute_90"],
        *[CUDA_SOURCES / "launch.cu", "-o", ptx],
    )
    kernels = kernels_in(ptx.read_text())
    assert len(kernels) == 4  # types
    for name, body in kernels.items():
        accesses = re.findall(r"\b(ld|st)\.global\.", body)
        assert accesses == ["ld"] * LOADS + ["st"] * LOADS, name
        assert ".local" not in body, name
        assert not re.search(r"\b(ld|st)\.[vfusb]\d", body), f"generic access: {name}"


def check_syntax(source: Path, *, headers: Sequence[Path]) -> None:
    includes = itertools.chain.from_iterable(("-isystem", h) for h in headers)
    compile_or_fail(
        *[GXX, *FLAGS, "-fsyntax-only", "-Wextra", "-Werror", "-DMINIDP_CUDA"],
        # A torch without CUDA lacks one generated header; it only sets export macros.
        *["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", *includes, source],
    )


@needs_gxx
@needs_toolkit_headers
@needs_torch_headers
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda/copy_rows.cpp", "flatten.cpp", "grad_hook.cpp"])
def test_what_knows_of_cuda_compiles_without_a_warning(name):
    torch_api = TORCH_HEADERS / "torch" / "csrc" / "api" / "include"
    python = Path(sysconfig.get_path("include"))
    headers = [TORCH_HEADERS, torch_api, python, TOOLKIT_HEADERS]
    check_syntax(SOURCES / name, headers=headers)


@needs_gxx
@pytest.mark.slow
def test_the_header_of_the_copies_needs_no_cuda_toolkit(tmp_path):
    source = tmp_path / "includes_copies.cpp"
    source.write_text(f'#include "{CUDA_SOURCES / "copy_rows.h"}"\n')
    check_syntax(source, headers=[TORCH_HEADERS])


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
        *["-Wall", "-Wextra", "-Werror"],
        # g++ does not see that a value is used only where it was loaded.
        "-Wno-maybe-uninitialized",
        *["-I", CUDA_SOURCES, Path(__file__).with_name("host_check.cpp")],
        *["-o", library],
    )
    loaded = ctypes.CDLL(str(library))
    loaded.elements_per_block.restype = ctypes.c_int64
    return loaded


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def blocks_of(host, numels: Sequence[int]) -> tuple[Run, np.ndarray, np.ndarray]:
    """The run, and of each block its tensor and where in it the block begins."""
    rows = np.zeros(len(numels), ROW)
    rows["to"], rows["numel"] = range(len(numels)), numels
    per_block = host.elements_per_block()
    count = sum(-(-n // per_block) for n in numels)
    tags, begins = np.zeros(count, np.int64), np.zeros(count, np.int64)
    run = Run(rows.ctypes.data, len(rows), 1.0, 0, 0, 0)
    host.plan(ctypes.byref(run), pointer(tags), pointer(begins))
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


def test_the_parameters_of_a_launch_fit(host):
    assert host.rows_per_launch() * ROW.itemsize + 24 <= 4096
    assert host.elements_per_block() == LOADS * host.threads_per_block()


# --------------------------------------------------------------------------- copies

FLOATS = {
    "f": torch.float32,
    "d": torch.float64,
    "h": torch.float16,
    "b": torch.bfloat16,
}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMELS = [*range(35), 255, 256, 257, 2047, 2048, 2049, 0, 9001, *[7] * 120]
GUARD = 3  # elements behind each tensor, that nobody may touch

types = pytest.mark.parametrize("type_", list(FLOATS))
scales = pytest.mark.parametrize("scale", [1.0, 1 / 2, 1 / 3, 1 / 7])


@pytest.fixture(scope="module")
def copy(host):
    """``copy(type, to, of, scale)`` -> `Run`; lists of tensors."""
    if not hasattr(host, "copy"):
        pytest.skip("no headers of a CUDA toolkit")
    host.copy.argtypes = [ctypes.c_char, ctypes.c_void_p]

    def call(type_, to, of, scale=1.0):
        rows = np.zeros(len(to), ROW)
        rows["to"] = [tensor.data_ptr() for tensor in to]
        rows["from"] = [tensor.data_ptr() for tensor in of]
        rows["numel"] = [tensor.numel() for tensor in to]
        run = Run(rows.ctypes.data, len(rows), scale, 0, 0, 0)
        host.copy(type_.encode(), ctypes.byref(run))
        return run

    return call


def any_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """All kinds of values: every second one ordinary, the others any bit pattern."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    values = raw.view(dtype)
    values[::2] = torch.randn(len(values[::2]), dtype=torch.float64).to(dtype)
    return values


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Apart from the bits of a NaN."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    bits = BITS[found.itemsize]
    keep = ~found.isnan()
    assert torch.equal(found.view(bits)[keep], expected.view(bits)[keep])


def with_guards(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors of all sizes, and the memory behind each."""
    rooms = [torch.full((n + GUARD,), 42.0, dtype=dtype) for n in NUMELS]
    pairs = [(room[:n], room[n:]) for room, n in zip(rooms, NUMELS, strict=True)]
    inside, behind = zip(*pairs, strict=True)
    return list(inside), list(behind)


@types
@scales
def test_a_copy_has_torchs_bits(copy, type_, scale):
    dtype = FLOATS[type_]
    of = [any_bits(n, dtype) for n in NUMELS]
    to, behind = with_guards(dtype)
    copy(type_, to, of, scale)
    for found, source in zip(to, of, strict=True):
        assert_same_bits(found, source if scale == 1 else source * scale)
    assert all((room == 42).all() for room in behind)


@types
def test_a_copy_without_a_scale_keeps_the_bits_of_a_nan(copy, type_):
    dtype = FLOATS[type_]
    (source,) = of = [any_bits(5000, dtype)]
    to = [torch.zeros_like(source)]
    copy(type_, to, of)
    assert source.isnan().any()
    bits = BITS[dtype.itemsize]
    assert torch.equal(to[0].view(bits), source.view(bits))


@types
def test_every_element_is_scaled_once(copy, type_):
    """In place, a second time would show."""
    values = [torch.randn(n, dtype=torch.float64).to(FLOATS[type_]) for n in NUMELS]
    expected = [value * (1 / 3) for value in values]
    copy(type_, values, values, 1 / 3)
    for found, wanted in zip(values, expected, strict=True):
        assert_same_bits(found, wanted)


@types
def test_every_value_that_is_rounded_specially(copy, type_):
    """Ties, and neighbours of ties."""
    exponents = torch.arange(-30, 17, dtype=torch.float64)[:, None, None]
    near = torch.tensor([0, 2.0**-8, 2.0**-9, 2.0**-11, 2.0**-12, 3 * 2.0**-12])
    off = torch.tensor([0, 2.0**-40, -(2.0**-40), 2.0**-50], dtype=torch.float64)
    values = (2**exponents * (1 + near.double()[:, None] + off)).flatten()
    source = torch.cat([values, -values]).to(FLOATS[type_])
    for scale in [1 / 2, 1 / 3, 1 / 2049]:
        to = torch.zeros_like(source)
        copy(type_, [to], [source], scale)
        assert_same_bits(to, source * scale)


def test_more_tensors_than_one_launch_takes(copy, host):
    most = host.rows_per_launch()
    of = [torch.full((3,), float(k)) for k in range(2 * most + 1)]
    to = [torch.zeros(3) for _ in of]
    run = copy("f", to, of, 0.5)
    assert run.num_launches == 3
    assert run.most_rows == most
    assert [float(t.sum()) for t in to] == [1.5 * k for k in range(len(of))]
