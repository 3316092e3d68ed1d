#!/usr/bin/env bash
# Runs the tests of the kernels under AddressSanitizer and UBSan: a tool for whoever
# changes csrc/, not a part of the CI.
#
#     bash tests/native/asan.sh [PYTEST ARGUMENTS]
#
# Runs tests/shared_memory/threads.cpp, builds csrc/*.cpp into a scratch folder, then runs
# test_flatten.py and test_hooks.py with few examples: two or three minutes.  Finds reads and writes out of bounds, use after
# free, and undefined behaviour in our code; torch itself is not instrumented, so leaks
# (which Python and torch have on purpose) and the memory of torch's arenas are not
# looked at.  Needs g++ with libasan.  PYTHON (default: .venv/bin/python) is respected.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
CXX=${CXX:-g++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
binary=$scratch/_minidp_native.so

# The flags of minidp/native/binary.py, but for the optimisation; AVX2 if there is any,
# because the loops over registers are what reads out of bounds.
flags=(-std=c++20 -O1 -g -fPIC -fno-omit-frame-pointer -ffp-contract=off -fopenmp
    -fvisibility=hidden
    "-fsanitize=address,undefined" -fno-sanitize-recover=undefined
    # UBSan would want the type information of torch's classes, which it hides.
    -fno-sanitize=vptr
    -DTORCH_EXTENSION_NAME=_minidp_native -DTORCH_API_INCLUDE_EXTENSION_H)
if grep -qs avx2 /proc/cpuinfo; then
    flags+=(-mavx2 -mfma -mf16c -DCPU_CAPABILITY=AVX2 -DCPU_CAPABILITY_AVX2)
fi
mapfile -t headers < <("$PYTHON" -c '
import sysconfig
from torch.utils.cpp_extension import include_paths
for path in [*include_paths(), sysconfig.get_paths()["include"]]:
    print("-isystem" + path)')
libraries=$("$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent / "lib")')

echo "shared memory, with threads for ranks"
"$CXX" "${flags[@]}" "${headers[@]}" -pthread tests/shared_memory/threads.cpp \
    -o "$scratch/threads" -L"$libraries" -Wl,-rpath,"$libraries" -lc10
setarch "$(uname -m)" -R "$scratch/threads"

objects=()
for source in csrc/*.cpp; do
    object=$scratch/$(basename "$source" .cpp).o
    echo "compiling $source"
    "$CXX" "${flags[@]}" "${headers[@]}" -c "$source" -o "$object"
    objects+=("$object")
done
"$CXX" "${flags[@]}" -shared "${objects[@]}" -o "$binary" \
    -L"$libraries" -Wl,-rpath,"$libraries" -lc10 -ltorch_cpu -ltorch -ltorch_python

# libstdc++ too: libasan must find __cxa_throw when it starts, before Python loads it.
LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libstdc++.so)"
export LD_PRELOAD
# Python's own allocator would hide its blocks from the sanitizer.
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# Not two copies of the kernels in one process.
export MINIDP_NATIVE=0 MINIDP_TEST_BINARY=$binary
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-dev}

"$PYTHON" -m pytest tests/native/test_flatten.py tests/native/test_hooks.py \
    -p no:cacheprovider -m "not slow" "$@"
