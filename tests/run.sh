#!/usr/bin/env bash
# Runs the tests in stages, one after the other, and stops at the first that fails:
#
#     bash tests/run.sh              what every change must pass: 8 minutes at most
#     bash tests/run.sh --full       each option, in both modes: about 14 minutes
#     bash tests/run.sh --nightly    long fuzzing, chaos, sanitizers, trainers, packaging
#     bash tests/run.sh unit native  only these stages
#     bash tests/run.sh unit -- -k layout -x     words for pytest
#
# Makes the Python environment in .venv first. Needs Python and, the first time, a
# network. Environment variables: HYPOTHESIS_PROFILE replaces the profile of every stage;
# MINIDP_TEST_WORKERS is the number of pytest processes (default: two per core, because
# many tests wait); MINIDP_PYTHON: see examples/environment.sh. The stages are in
# tests/noxfile.py, for nox:
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# One thread per rank, or the ranks fight over the cores; and gloo on the loopback
# device, or it binds to whatever the host name happens to resolve to.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export MPLBACKEND=${MPLBACKEND:-Agg}  # plots are written to files, never shown
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import us

extras=test,examples chosen=() words=() help=
while (($#)); do
    case $1 in
    -h | --help) help=yes ;;
    --full) chosen=(--tags full) extras+=,bench,page,torchft ;;
    --nightly) chosen=(--tags nightly) extras+=,bench,trainers,page,torchft ;;
    --) words=("$@") && break ;;
    -*) echo "unknown option $1; see --help" >&2 && exit 2 ;;
    *)
        [[ ${chosen[*]-} ]] || chosen=(--session)
        chosen+=("$1")
        case $1 in
        benchmarks | gpu) extras+=,bench ;;
        page*) extras+=,page ;;
        torchft* | trainers) extras+=,${1%-chaos} ;;
        esac
        ;;
    esac
    shift
done
[[ ${chosen[*]-} ]] || chosen=(--tags fast)

source examples/environment.sh
echo "=== environment"
minidp_environment "$extras" || exit
nox() { "$PYTHON" -m nox --noxfile tests/noxfile.py "$@"; }
if [[ $help ]]; then
    sed -n '2,/^set/s/^#\{1,1\} \{0,1\}//p' "$0"
    nox --list
    exit
fi
nox "${chosen[@]}" ${words[@]+"${words[@]}"}
