#!/usr/bin/env bash
# Makes the Python environment in .venv, then runs tests/stages.py, which says more:
# `bash tests/run.sh --help`. Needs Python and, the first time, a network.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# One thread per rank, or the ranks fight over the cores; and gloo on the loopback
# device, or it binds to whatever the host name happens to resolve to.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export MPLBACKEND=${MPLBACKEND:-Agg}  # plots are written to files, never shown

stages() { "${PYTHON:-${MINIDP_PYTHON:-python3}}" -m tests.stages "$@"; }

if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
    stages --help
    exit
fi
extras=$(stages --extras "$@") || exit  # a wrong name is refused at once

source examples/environment.sh
trap 'echo "Interrupted while the environment was made." >&2; exit 130' INT
echo "=== environment"
minidp_environment "$extras" || exit
echo "=== environment: ok after $SECONDS s"
exec "$PYTHON" -m tests.stages "$@"
