#!/usr/bin/env bash
# Runs the native hook under ThreadSanitizer: a tool for whoever changes csrc/, not a
# part of the CI.
#
#     bash tests/native/tsan.sh [PYTEST ARGUMENTS]
#
# Runs tests/shared_memory/threads.cpp, builds csrc/*.cpp into a scratch folder, then runs
# test_hooks.py and test_threads.py with it.  Finds two threads that touch the same memory
# of ours without an order between them.  Python and torch are not instrumented: what
# they order by atomics of their own is unknown to the sanitizer, so reports about memory
# that only they touch, or that they hand from thread to thread, are suppressed (below).
# Needs g++ with libtsan.  PYTHON (default: .venv/bin/python) is respected.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
CXX=${CXX:-g++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
binary=$scratch/_minidp_native.so

# No OpenMP: libgomp's barriers are not instrumented either.
flags=(-std=c++20 -O1 -g -fPIC -fno-omit-frame-pointer -ffp-contract=off
    -fvisibility=hidden -fsanitize=thread
    -DTORCH_EXTENSION_NAME=_minidp_native -DTORCH_API_INCLUDE_EXTENSION_H)
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

cat >"$scratch/suppressions" <<'END'
called_from_lib:libtorch_cpu.so
called_from_lib:libtorch_python.so
called_from_lib:libc10.so
called_from_lib:libgomp.so
race:libtorch_cpu.so
race:libtorch_python.so
race:libpython
race:^Py
race:^_Py
deadlock:libtorch_cpu.so
deadlock:libpython
END

LD_PRELOAD="$("$CXX" -print-file-name=libtsan.so) $("$CXX" -print-file-name=libstdc++.so)"
export LD_PRELOAD
export TSAN_OPTIONS="suppressions=$scratch/suppressions:report_signal_unsafe=0:ignore_noninstrumented_modules=1:exitcode=66:history_size=4:log_path=$scratch/report"
# The kernels under test in one process, and not two copies of them.
export MINIDP_NATIVE=0 MINIDP_TEST_BINARY=$binary
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-dev}

status=0
# No randomised addresses: older versions of libtsan do not find their shadow otherwise.
setarch "$(uname -m)" -R "$PYTHON" -m pytest tests/native/test_hooks.py \
    tests/native/test_threads.py -p no:cacheprovider -m "not slow" "$@" \
    || status=$?
if compgen -G "$scratch/report*" >/dev/null; then
    cat "$scratch"/report*
fi
echo "reports: $(cat "$scratch"/report* 2>/dev/null | grep -c '^WARNING: ThreadSanitizer' || true)"
exit "$status"
