"""The GPU kernels, as far as a machine without a GPU can tell.

They compile; their chunks cover every element once; and their per-thread code, run on
the CPU one thread after the other, has torch's bits.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

CUDA_SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
TORCH_HEADERS = Path(torch.__file__).parent / "include"
NVCC = shutil.which("nvcc")
GXX = shutil.which("g++")


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


@needs_nvcc
@pytest.mark.slow
def test_the_kernels_compile_without_a_warning(tmp_path):
    archs = compile_or_fail(NVCC, "--list-gpu-arch").split()
    oldest = min(archs, key=lambda arch: int(arch.removeprefix("compute_")))
    compile_or_fail(
        *[NVCC, "-std=c++17", "-O3", "-c", CUDA_SOURCES / "flatten.cu"],
        *["-o", tmp_path / "flatten.o", "-Werror", "all-warnings"],
        *["-Xcompiler", "-Wall,-Wextra,-Werror"],
        *["-gencode", "arch=compute_90,code=sm_90"],
        *["-gencode", f"arch={oldest},code={oldest.replace('compute', 'sm')}"],
    )


# Types in mangled names; a repeated type becomes a back reference.
SIZES = {"f": 4, "d": 8, "6__half": 2, "13__nv_bfloat16": 2}
SIZES |= {"h": 1, "t": 2, "j": 4, "m": 8}


def kernels_in(ptx: str) -> dict[str, str]:
    """Mangled name -> body."""
    pieces = re.split(r"\.entry (\w+)", ptx)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def sizes_in(kernel: str) -> tuple[int, int]:
    """Of source and destination elements."""
    one = "|".join(SIZES)
    src, dst = re.search(rf"I({one})({one}|S\w*_)Lb[01]", kernel).groups()
    return SIZES[src], SIZES.get(dst, SIZES[src])


@needs_nvcc
@pytest.mark.slow
def test_every_kernel_has_16_byte_accesses_and_no_local_memory(tmp_path):
    ptx = tmp_path / "flatten.ptx"
    compile_or_fail(
        *[NVCC, "-std=c++17", "-O3", "-ptx", "-arch=compute_90"],
        *[CUDA_SOURCES / "flatten.cu", "-o", ptx],
    )
    kernels = kernels_in(ptx.read_text())
    # 4 x 4 types, with and without statistics, and 4 raw widths; 2 table sizes each.
    assert len(kernels) == 2 * (4 * 4 * 2 + 4)
    for name, body in kernels.items():
        wide = re.findall(r"\b(ld|st)\.global\.v(?:4\.\w32|2\.\w64)\b", body)
        src, dst = sizes_in(name)
        if src >= dst:
            assert wide.count("ld") >= 4, name
        if dst >= src:
            assert wide.count("st") >= 4, name
        assert ".local" not in body, name  # packs stay in registers
        assert not re.search(r"\b(ld|st)\.[vfusb]\d", body), f"generic access: {name}"


def check_syntax(source: Path, *, headers: Sequence[Path]) -> None:
    includes = itertools.chain.from_iterable(("-isystem", h) for h in headers)
    compile_or_fail(
        *[GXX, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"],
        # A torch without CUDA lacks one generated header; it only sets export macros.
        *["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", *includes, source],
    )


@needs_gxx
@needs_toolkit_headers
@needs_torch_headers
@pytest.mark.slow
def test_the_plan_compiles_without_a_warning():
    check_syntax(CUDA_SOURCES / "plan.cpp", headers=[TORCH_HEADERS, TOOLKIT_HEADERS])


@needs_gxx
@pytest.mark.slow
def test_the_plans_header_needs_no_cuda_toolkit(tmp_path):
    source = tmp_path / "includes_plan.cpp"
    source.write_text(f'#include "{CUDA_SOURCES / "plan.h"}"\n')
    check_syntax(source, headers=[TORCH_HEADERS])


# --------------------------------------------------------------------------- chunks

SLOT = np.dtype([("offset", "i8"), ("numel", "i8")])
CHUNK = np.dtype(
    [("buffer_begin", "i8"), ("slot_begin", "i8"), ("slot", "i4"), ("numel", "i4")]
)
LAUNCH = np.dtype(
    [
        (name, "i8")
        for name in ("first_slot", "num_slots", "first_chunk", "num_wide", "num_small")
    ]
)
TEAM = np.dtype([("chunk", "i8"), ("thread", "i4"), ("num_threads", "i4")])

# As in chunks.h.
THREADS, WARPS = 256, 8
CHUNK_BYTES, SMALL_BYTES = 32 * 1024, 4 * 1024
MAX_SLOTS = (32764 - 128) // 8


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The host version of the kernels, as a shared library."""
    if GXX is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("host") / "host_check.so"
    headers = ["-isystem", TOOLKIT_HEADERS] if TOOLKIT_HEADERS else []
    compile_or_fail(
        *[GXX, "-std=c++17", "-O1", "-shared", "-fPIC", *headers],
        *["-Wall", "-Wextra", "-Werror"],
        # g++ does not see that a pack is used only where it was loaded.
        "-Wno-maybe-uninitialized",
        *[
            "-I",
            CUDA_SOURCES,
            Path(__file__).with_name("host_check.cpp"),
            "-o",
            library,
        ],
    )
    loaded = ctypes.CDLL(str(library))
    loaded.blocks_of.restype = ctypes.c_int64
    return loaded


def slots_of(numels: Sequence[int], gap: int = 0) -> np.ndarray:
    slots = np.zeros(len(numels), SLOT)
    slots["numel"] = numels
    slots["offset"][1:] = np.cumsum(slots["numel"] + gap)[:-1]
    slots["offset"] += gap
    return slots


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def make_schedule(host, slots, element_size, max_slots=MAX_SLOTS):
    """(chunks, launches)"""
    sizes = np.zeros(2, np.int64)
    numbers = [ctypes.c_int64(n) for n in (len(slots), element_size, max_slots)]
    host.make(pointer(slots), *numbers, pointer(sizes), None, None)
    chunks, launches = np.zeros(sizes[0], CHUNK), np.zeros(sizes[1], LAUNCH)
    arrays = [pointer(a) for a in (sizes, chunks, launches)]
    host.make(pointer(slots), *numbers, *arrays)
    return chunks, launches


def teams_in(host, launch) -> np.ndarray:
    """Blocks x threads."""
    launch = np.array(launch, LAUNCH)
    blocks = host.blocks_of(pointer(launch))
    teams = np.zeros((blocks, THREADS), TEAM)
    host.teams_of(pointer(launch), pointer(teams))
    return teams


def check_cover(slots, chunks, element_size):
    """Every element exactly once, in chunks of a bounded size."""
    assert (chunks["numel"] > 0).all()
    assert (chunks["numel"].astype(np.int64) * element_size <= CHUNK_BYTES).all()
    ordered = np.sort(chunks, order=["slot", "slot_begin"])
    ends = dict.fromkeys(range(len(slots)), 0)
    for chunk in ordered:
        k = int(chunk["slot"])
        assert chunk["slot_begin"] == ends[k]
        assert chunk["buffer_begin"] == slots["offset"][k] + chunk["slot_begin"]
        ends[k] += int(chunk["numel"])
    assert list(ends.values()) == slots["numel"].tolist()


def check_teams(host, chunks, launches, element_size):
    """Every chunk has one whole team: a block, or a warp if it is small."""
    found = []
    for launch in launches:
        teams = teams_in(host, launch)
        blocks, _ = np.nonzero(teams["chunk"] >= 0)
        busy = teams[teams["chunk"] >= 0]
        mine, starts, sizes = np.unique(
            busy["chunk"], return_index=True, return_counts=True
        )
        bytes_of = chunks["numel"][mine].astype(np.int64) * element_size
        assert (sizes == np.where(bytes_of <= SMALL_BYTES, 32, THREADS)).all()
        # Neighbouring threads of one block, numbered from 0.
        rank = np.arange(len(busy)) - np.repeat(starts, sizes)
        assert (busy["thread"] == rank).all()
        assert (busy["num_threads"] == np.repeat(sizes, sizes)).all()
        assert (blocks == np.repeat(blocks[starts], sizes)).all()
        slots = chunks["slot"][mine] - launch["first_slot"]
        assert ((slots >= 0) & (slots < launch["num_slots"])).all()
        found += mine.tolist()
    assert found == list(range(len(chunks)))


@settings(max_examples=30)
@given(
    numels=st.lists(st.one_of(st.integers(0, 70), st.integers(0, 40_000)), max_size=30),
    element_size=st.sampled_from([1, 2, 4, 8]),
    gap=st.integers(0, 3),
    max_slots=st.sampled_from([1, 7, MAX_SLOTS]),
)
def test_any_bucket_is_covered_once(host, numels, element_size, gap, max_slots):
    slots = slots_of(numels, gap)
    chunks, launches = make_schedule(host, slots, element_size, max_slots)
    check_cover(slots, chunks, element_size)
    check_teams(host, chunks, launches, element_size)
    assert launches["num_slots"].sum() == len(numels)
    assert all(launches["num_slots"] <= max_slots)


def test_tiny_slots_share_blocks_even_between_large_ones(host):
    slots = slots_of([100, 20_000] * 1000)
    chunks, launches = make_schedule(host, slots, 4)
    check_cover(slots, chunks, 4)
    (launch,) = launches
    assert launch["num_small"] == 1000
    blocks = teams_in(host, launch)["chunk"]
    assert len(blocks) - launch["num_wide"] == 1000 / WARPS
    assert len(np.unique(blocks[-1])) == WARPS


def test_one_huge_slot_of_more_than_32_bits(host):
    slots = slots_of([3, 5 * 2**31 + 1])
    chunks, launches = make_schedule(host, slots, 1)
    (launch,) = launches
    assert launch["num_wide"] == 5 * 2**31 // CHUNK_BYTES
    assert launch["num_small"] == 2  # the little slot, the last element
    assert chunks["numel"].astype(np.int64).sum() == 5 * 2**31 + 4
    assert chunks["slot_begin"].max() == 5 * 2**31


def test_more_slots_than_parameters_take_several_launches(host):
    slots = slots_of([3] * (2 * MAX_SLOTS + 10))
    chunks, launches = make_schedule(host, slots, 4)
    check_cover(slots, chunks, 4)
    check_teams(host, chunks, launches, 4)
    assert launches["num_slots"].tolist() == [MAX_SLOTS, MAX_SLOTS, 10]


def test_empty_slots_have_no_chunks(host):
    chunks, launches = make_schedule(host, slots_of([0, 0, 0]), 4)
    assert len(chunks) == 0
    assert len(teams_in(host, launches[0])) == 0
    chunks, _ = make_schedule(host, slots_of([0, 5, 0]), 4)
    assert chunks["slot"].tolist() == [1]


# ------------------------------------------------------------------------ transfers

FLOATS = {
    "f": torch.float32,
    "d": torch.float64,
    "h": torch.float16,
    "b": torch.bfloat16,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Run(ctypes.Structure):
    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("element_size", ctypes.c_int64),
        ("max_slots", ctypes.c_int64),
        ("buffer", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("into_buffer", ctypes.c_int64),
        ("squares", ctypes.c_double),
        ("lowest", ctypes.c_int64),
        ("misaligned", ctypes.c_int64),
        ("wide", ctypes.c_int64),
        ("narrow", ctypes.c_int64),
    ]


@pytest.fixture(scope="module")
def transfer(host):
    """``transfer(types, slots, buffer, grads, scale=1.0, ...)`` -> `Run`."""
    if not hasattr(host, "transfer"):
        pytest.skip("no headers of a CUDA toolkit")
    host.transfer.argtypes = [ctypes.c_char, ctypes.c_char, ctypes.c_void_p]

    def call(types, slots, buffer, grads, scale=1.0, *, into=True, max_slots=MAX_SLOTS):
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        table = np.array(addresses, np.uint64)
        size = buffer.element_size()
        run = Run(
            *(slots.ctypes.data, len(slots), size, max_slots),
            *(buffer.data_ptr(), table.ctypes.data, scale, into, 0.0, len(slots)),
        )
        host.transfer(types[0].encode(), types[1].encode(), ctypes.byref(run))
        assert run.misaligned == 0
        return run

    return call


def memory(numel: int, dtype: torch.dtype, skew: int = 0) -> torch.Tensor:
    """Zeros that start `skew` elements after a boundary of 64 bytes."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.zeros((numel + skew) * size + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + skew * size
    return raw[start : start + numel * size].view(dtype)


def any_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """All kinds of values: every second one ordinary, the others any bit pattern."""
    size = torch.empty((), dtype=dtype).element_size()
    values = torch.randint(0, 256, (numel * size,), dtype=torch.uint8).view(dtype)
    values[::2] = torch.randn(len(values[::2]), dtype=torch.float64).to(dtype)
    return values


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Apart from the bits of a NaN."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    bits = BITS[found.element_size()]
    found, expected = (t.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
                       for t in (found, expected))  # fmt: skip
    assert torch.equal(found.view(bits), expected.view(bits))


def windows(buffer: torch.Tensor, slots: np.ndarray) -> list[torch.Tensor]:
    return [buffer[s["offset"] : s["offset"] + s["numel"]] for s in slots]


# Heads and tails of every length, an empty slot, small chunks, wide ones, several.
NUMELS = [*range(35), 1000, 4099, 0, 9001, 20_011]
GAP = 2  # elements between slots, that nobody may touch

type_pairs = pytest.mark.parametrize(
    "types", list(itertools.product(FLOATS, FLOATS)), ids="->".join
)
scales = pytest.mark.parametrize("scale", [1.0, 1 / 2, 1 / 3, 1 / 7])


@type_pairs
@scales
def test_flatten_has_torchs_bits(transfer, types, scale):
    src, dst = FLOATS[types[0]], FLOATS[types[1]]
    slots = slots_of(NUMELS, GAP)
    numel = int(slots["offset"][-1] + slots["numel"][-1]) + GAP
    buffer = memory(numel, dst, skew=1)
    buffer.fill_(42)
    grads = [any_bits(n, src) for n in NUMELS]
    expected = buffer.clone()
    for view, grad in zip(windows(expected, slots), grads, strict=True):
        view.copy_(grad if scale == 1 else grad * scale)
    run = transfer(types, slots, buffer, grads, scale, max_slots=11)
    assert_same_bits(buffer, expected)
    assert run.wide > 0
    finite = [bool(view.isfinite().all()) for view in windows(expected, slots)]
    assert run.lowest == finite.index(False)


@type_pairs
def test_unflatten_has_torchs_bits(transfer, types):
    src, dst = FLOATS[types[0]], FLOATS[types[1]]
    slots = slots_of(NUMELS, GAP)
    buffer = any_bits(int(slots["offset"][-1] + slots["numel"][-1]), src)
    # Room behind each gradient, that nobody may touch.
    rooms = [memory(n + 3, dst).fill_(42) for n in NUMELS]
    grads = [room[:n] for room, n in zip(rooms, NUMELS, strict=True)]
    transfer(types, slots, buffer, grads, into=False)
    for grad, view, room in zip(grads, windows(buffer, slots), rooms, strict=True):
        assert_same_bits(grad, view.to(dst))
        assert torch.equal(room[len(grad) :], torch.full((3,), 42, dtype=dst))


@type_pairs
def test_every_value_that_a_conversion_rounds_specially(transfer, types):
    """Ties, and doubles that two roundings take elsewhere than one."""
    src, dst = FLOATS[types[0]], FLOATS[types[1]]
    exponents = torch.arange(-30, 17, dtype=torch.float64)[:, None, None]
    near = torch.tensor([0, 2.0**-8, 2.0**-9, 2.0**-11, 2.0**-12, 3 * 2.0**-12])
    off = torch.tensor([0, 2.0**-40, -(2.0**-40), 2.0**-50], dtype=torch.float64)
    values = (2**exponents * (1 + near.double()[:, None] + off)).flatten()
    grad = torch.cat([values, -values]).to(src)
    slots = slots_of([len(grad)])
    for scale in [1.0, 1 / 3]:
        buffer = memory(len(grad), dst)
        transfer(types, slots, buffer, [grad], scale)
        assert_same_bits(buffer, (grad * scale).to(dst))


@pytest.mark.parametrize(
    "types", ["ff", "hh", "fh", "hf", "dh", "hd", "db", "22", "8" * 2]
)
def test_every_misalignment(transfer, types):
    raw = types[0].isdigit()
    src, dst = (BITS[int(t)] if raw else FLOATS[t] for t in types)
    for skews in itertools.product(range(9), range(9)):
        for numel in [1, 5, 40, 3000]:
            values = torch.randint(-50, 50, (numel,)).to(src)
            grad = memory(numel, src, skews[0]).copy_(values)
            around = memory(numel + skews[1] + 4, dst).fill_(-77)
            buffer = around[skews[1] : skews[1] + numel]
            transfer(types, slots_of([numel]), buffer, [grad])
            assert torch.equal(buffer, values.to(dst))
            outside = torch.cat([around[: skews[1]], around[skews[1] + numel :]])
            assert (outside == -77).all()


@type_pairs
def test_equally_aligned_memory_is_copied_in_wide_accesses(transfer, types):
    src, dst = FLOATS[types[0]], FLOATS[types[1]]
    numel, skew = 4000, 1  # one chunk
    grad = memory(numel, src, skew)
    larger = max(src.itemsize, dst.itemsize)
    run = transfer(types, slots_of([numel]), memory(numel, dst, skew), [grad])
    packs = (numel - 2 * 16 / larger) * larger / 16
    assert run.wide >= packs * (2 if src.itemsize == dst.itemsize else 1)
    others = 0 if src.itemsize == dst.itemsize else numel * larger / 16
    assert run.narrow <= others + 4 * 16


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_raw_words_keep_every_bit(transfer, size):
    slots = slots_of(NUMELS, GAP)
    dtype = BITS[size]
    grads = [
        torch.randint(0, 256, (n * size,), dtype=torch.uint8).view(dtype)
        for n in NUMELS
    ]
    buffer = memory(int(slots["offset"][-1] + slots["numel"][-1]), dtype)
    transfer(str(size) * 2, slots, buffer, grads)
    back = [torch.zeros_like(grad) for grad in grads]
    transfer(str(size) * 2, slots, buffer, back, into=False)
    for view, grad, copy in zip(windows(buffer, slots), grads, back, strict=True):
        assert torch.equal(view, grad)
        assert torch.equal(copy, grad)


@pytest.mark.parametrize("into", [True, False])
def test_a_null_gradient_is_skipped(transfer, into):
    slots = slots_of([5, 9000, 7, 3])
    buffer = memory(9015, torch.float32).fill_(2)
    grads = [torch.full((int(n),), 3.0) for n in slots["numel"]]
    given_grads = [grads[0], None, None, grads[3]]
    transfer("ff", slots, buffer, given_grads, into=into, max_slots=3)
    if into:
        means = [float(view.mean()) for view in windows(buffer, slots)]
        assert means == [3, 2, 2, 3]
    else:
        assert [float(grad.mean()) for grad in grads] == [2, 3, 3, 2]
        assert (buffer == 2).all()


def test_a_gradient_may_be_its_own_slot(transfer):
    values = torch.randn(9003)
    buffer = memory(9003, torch.float32, 3).copy_(values)
    transfer("ff", slots_of([9003]), buffer, [buffer], 1 / 3)
    assert_same_bits(buffer, values * (1 / 3))


@type_pairs
def test_statistics_are_those_of_what_was_written(transfer, types):
    src, dst = FLOATS[types[0]], FLOATS[types[1]]
    slots = slots_of(NUMELS)
    grads = [torch.randn(n, dtype=torch.float64).to(src) for n in NUMELS]
    buffer = memory(int(slots["numel"].sum()), dst)
    run = transfer(types, slots, buffer, grads, 1 / 3)
    assert run.squares == pytest.approx(float(buffer.double().square().sum()))
    assert run.lowest == len(NUMELS)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_the_lowest_slot_with_a_non_finite_value(transfer, bad):
    slots = slots_of([4, 20_000, 9, 9, 12_000])
    buffer = memory(int(slots["numel"].sum()), torch.float32)
    grads = [torch.ones(int(n)) for n in slots["numel"]]
    grads[4][11_999] = bad
    assert transfer("ff", slots, buffer, grads).lowest == 4
    grads[2][8] = bad
    assert transfer("ff", slots, buffer, grads).lowest == 2
    grads[1][17_003] = bad
    assert transfer("ff", slots, buffer, grads).lowest == 1


def test_a_conversion_that_overflows_counts_as_non_finite(transfer):
    buffer = memory(3, torch.float16)
    grads = [torch.ones(1), torch.tensor([70_000.0]), torch.ones(1)]
    run = transfer("fh", slots_of([1, 1, 1]), buffer, grads)
    assert buffer.tolist() == [1, torch.inf, 1]
    assert run.lowest == 1
