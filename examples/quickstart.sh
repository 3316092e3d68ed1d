#!/usr/bin/env bash
# From a fresh clone to a verdict:
#
#     bash examples/quickstart.sh [--epochs N] [--batch-size N] [--seed N] [--smoke]
#
# Makes a Python environment in .venv (or uses the one that is there), builds the C++
# extension (once; MINIDP_NATIVE=0: not), then trains a small net with two processes on
# torch's DDP and on minidp. Says "identical: yes" and ends with status 0 only if every
# gradient of every step was the same on every rank. The last line opens a page that shows
# where the time of a step went. Each part says on standard error when it begins.
# Needs Python 3.10 or newer and, the first time, a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
-h | --help)
    sed -n '2,/^set/{ s/^# \{0,1\}//p; }' examples/quickstart.sh
    exit
    ;;
esac

source examples/environment.sh
_minidp_say "an environment, the extension, then training: a minute, the first time some minutes"
minidp_environment examples
minidp_extension

# Two processes on two GPUs use NCCL and need no help. On CPU each gets one thread, and
# Gloo talks over the loopback device: a host name that leads nowhere cannot hurt it.
if ! "$PYTHON" -c 'import torch; raise SystemExit(torch.cuda.device_count() < 2)'; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    case $(uname -s) in
    Linux) export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} ;;
    Darwin) export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo0} ;;
    esac
fi

page=examples/data/digits.html
mkdir -p examples/data
_minidp_say "starting two processes, which import torch; then a line for each epoch"
"$PYTHON" -m torch.distributed.run --nproc-per-node 2 \
    --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 \
    examples/train_digits.py --page "$page" "$@"

case $(uname -s) in Darwin) opener=open ;; *) opener=xdg-open ;; esac
echo "where the time of a step went: $opener $PWD/$page"
