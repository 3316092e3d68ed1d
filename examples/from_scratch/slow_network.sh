#!/usr/bin/env bash
# Run a command in a network of its own, where all bytes share one slow line:
#
#     bash examples/from_scratch/slow_network.sh 4gbit \
#         python examples/from_scratch/stage4_overlap.py
#
# For Linux with iproute2 (`tc`, `ip`). Needs root, or a system that lets users make
# namespaces. The network vanishes with the command, and no other process sees it.
set -euo pipefail
rate=$1
shift
# shellcheck disable=SC2016  # the other shell expands it
exec unshare --map-root-user --net bash -c '
    ip link set lo up
    tc qdisc add dev lo root tbf rate "$0" burst 256kb latency 100ms
    exec "$@"' "$rate" "$@"
