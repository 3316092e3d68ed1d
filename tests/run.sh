#!/usr/bin/env bash
# The whole CI, runnable by hand from a fresh clone:
#
#     bash tests/run.sh                  everything, cheapest stage first
#     bash tests/run.sh lint unit        these stages only
#
# Needs Python and, the first time, a network.  Stops at the first stage that fails; a
# stage without anything to run is a failure too, because a check that silently found
# nothing looks just like one that passed.  HYPOTHESIS_PROFILE (default here: ci) and
# the variables of examples/environment.sh are respected.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

ALL_STAGES=(
    lint types unit property distributed fault conformance
    native native-unit native-property native-distributed native-fault
    examples benchmarks
)
# By name only, for minutes. When csrc/ or its build have changed: torch's own tests on the
# extension, and an extension that includes torch's headers. And Accelerate, Lightning and
# Transformers on minidp, which are installed for that. And clean builds that are installed
# in fresh environments, with mypy and pyright. And what needs a GPU.
OTHER_STAGES=(native-conformance native-torch trainers packaging gpu)

# One thread per rank, or the ranks fight over the cores; and gloo on the loopback
# device, or it binds to whatever the host name happens to resolve to.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci}
# Plots are written to files, never shown.
export MPLBACKEND=${MPLBACKEND:-Agg}

source examples/environment.sh

stage_lint() {
    "$PYTHON" -m ruff format --check . && "$PYTHON" -m ruff check .
}

stage_types() {
    "$PYTHON" -m mypy
}

# Two at a time: many tests wait, for processes to start and for timeouts to pass. pytest
# fails by itself if it collects nothing.
run_pytest() { "$PYTHON" -m pytest --numprocesses 2 --dist worksteal "$@"; }

# Everything twice: with the reference in Python, and with the native extension.
python_mode() { MINIDP_NATIVE=0 run_pytest "$@"; }

native_mode() {
    if no_compiler; then
        echo "skipped: there is no C++ compiler (${CXX:-c++}) to build the extension with"
    else
        MINIDP_NATIVE=1 run_pytest "$@"
    fi
}

USES_TORCH=tests/native/test_build.py::test_an_extension_that_uses_torch

conform() { "$PYTHON" tests/conformance/run.py; }

no_compiler() { ! command -v "${CXX:-c++}" >/dev/null; }

stage_unit() { python_mode tests/unit; }
stage_property() { python_mode tests/property; }
stage_distributed() { python_mode tests/distributed tests/gpu -m "not gpu"; }
stage_fault() { HYPOTHESIS_PROFILE=brief python_mode tests/fault -m "not slow"; }
stage_conformance() { python_mode tests/conformance && MINIDP_NATIVE=0 conform; }
stage_native() {
    no_compiler || "$PYTHON" -m minidp.native build &&
        native_mode tests/native --deselect "$USES_TORCH"
}
stage_native-torch() { native_mode "$USES_TORCH"; }
# What touches hooks and copies; the rest does not know which ones it has.
stage_native-unit() {
    native_mode tests/unit/test_autograd.py tests/unit/test_bucket.py \
        tests/unit/test_countdown.py tests/unit/test_data_parallel.py \
        tests/unit/test_guard.py tests/unit/test_recording.py \
        tests/unit/test_recovery.py
}
# The laws are the same, so fewer examples do.
stage_native-property() { HYPOTHESIS_PROFILE=brief native_mode tests/property; }
# What goes through its hooks and copies in unusual ways.
stage_native-distributed() {
    native_mode tests/distributed/test_matrix.py tests/distributed/test_delayed.py \
        tests/distributed/test_special_cases.py tests/distributed/test_overlap.py \
        tests/distributed/test_skip_unused.py tests/distributed/test_comm_hooks.py
}
# What runs in hooks and copies; who is missing does not depend on them.
stage_native-fault() {
    HYPOTHESIS_PROFILE=brief native_mode -m "not slow" tests/fault/test_faults.py \
        tests/fault/test_comm_hooks.py tests/fault/test_concurrency.py \
        tests/fault/test_leaks.py tests/fault/test_wrong_words.py
}
stage_trainers() { python_mode tests/trainers; }
stage_packaging() { MINIDP_TEST_PACKAGING=1 "$PYTHON" -m pytest tests/packaging; }
# Ten minutes at most: what would begin after seven fails, and nothing takes three. Alone:
# two tests at a time would wait for each other's kernels.
stage_gpu() {
    MINIDP_GPU_RESULTS=${MINIDP_GPU_RESULTS:-benchmarks/results} MINIDP_GPU_SECONDS=420 \
        "$PYTHON" -m pytest -p no:xdist -m gpu --timeout 170 tests/gpu
}
stage_native-conformance() { no_compiler || MINIDP_NATIVE=1 conform; }

# Runs `"$@" SCRIPT --smoke` for every script of the folder, two at a time: by glob, not
# from a list, so that a new script cannot be forgotten.
smoke() {
    local folder=$1
    shift
    if ! compgen -G "$folder/*.py" >/dev/null; then
        echo "no scripts in $folder/" >&2
        return 1
    fi
    printf '%s\0' "$folder"/*.py |
        xargs -0 -n 1 -P 2 bash -c 'smoke_one "$@"' - "$@"
}

# What a script says, in one piece, when it has ended. 255: xargs starts no other one.
smoke_one() {
    local script=${!#} said status
    said=$("${@:1:$#-1}" "$script" --smoke 2>&1)
    status=$?
    printf -- '--- %s --smoke\n%s\n' "$script" "$said"
    ((status == 0)) || { echo "$script failed: exit status $status"; return 255; }
}
export -f smoke_one

stage_examples() {
    smoke examples "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2
}

stage_benchmarks() {
    smoke benchmarks "$PYTHON"
}

# ------------------------------------------------------------------------------------

SUMMARY=()

record() {  # record NAME RESULT SECONDS
    local minutes
    minutes=$(awk -v seconds="$3" 'BEGIN { printf "%.1f", seconds / 60 }')
    SUMMARY+=("$(printf '%-18s %-8s %6s min' "$1" "$2" "$minutes")")
    echo "=== $1: $2 after $minutes min"
}

summarise() {
    printf '\n%-18s %-8s %10s\n' stage result time
    printf '%s\n' "${SUMMARY[@]}"
}

run_stage() {  # run_stage NAME FUNCTION [ARGUMENTS]
    local name=$1 start=$SECONDS
    shift
    echo
    echo "=== $name"
    if "$@"; then
        record "$name" ok $((SECONDS - start))
    else
        record "$name" FAILED $((SECONDS - start))
        summarise
        exit 1
    fi
}

stages=("$@")
if (($# == 0)); then
    stages=("${ALL_STAGES[@]}")
fi
for stage in "${stages[@]}"; do
    if [[ " ${ALL_STAGES[*]} ${OTHER_STAGES[*]} " != *" $stage "* ]]; then
        echo "unknown stage '$stage'; there are: ${ALL_STAGES[*]} ${OTHER_STAGES[*]}" >&2
        exit 2
    fi
done

extras=test,examples,bench
if [[ " ${stages[*]} " == *" trainers "* ]]; then
    extras+=,trainers
fi
run_stage environment minidp_environment "$extras"
for stage in "${stages[@]}"; do
    run_stage "$stage" "stage_$stage"
done
summarise
