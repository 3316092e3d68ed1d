# shellcheck shell=bash
# Makes a Python environment in which minidp and its tools run.  To be sourced:
#
#     source examples/environment.sh
#     minidp_environment examples          # or: test,examples,bench
#     "$PYTHON" -m torch.distributed.run ...
#
# `minidp_environment EXTRAS` leaves the interpreter's path in PYTHON;
# `minidp_extension` then builds the C++ extension where there is a compiler.  All is kept
# in `.venv` at the top of the checkout, and the extension in ~/.cache/minidp; remove
# these folders to start over.  A second call with nothing changed costs an import of
# torch.  What you can set:
#
#     MINIDP_PYTHON   an interpreter that has everything already: used as it is,
#                     nothing is made or installed (for machines without a network)
#     MINIDP_TORCH    what to ask pip for where torch is missing, e.g. torch==2.12.1;
#                     pip's own settings (PIP_INDEX_URL, ...) say where it comes from

# The checkout that this file lies in.
_minidp_root() {
    (cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
}

# Succeeds if the interpreter $1 imports a torch that minidp supports.
_minidp_has_torch() {
    "$1" - 2>/dev/null <<'PY'
import re
import torch

release = re.match(r"(\d+)\.(\d+)", torch.__version__)
raise SystemExit(tuple(map(int, release.groups())) < (2, 12))
PY
}

# Prints the first interpreter on PATH that is new enough.
_minidp_base_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "minidp needs Python 3.10 or newer on PATH" >&2
    return 1
}

# Makes the virtual environment $1.  It looks at the system's packages only if those
# have a torch worth sharing: a container that ships torch built for its GPU should not
# fetch gigabytes again, and any other system's packages would only get in the way.
_minidp_make_venv() {
    local base options=()
    base=$(_minidp_base_python) || return 1
    if _minidp_has_torch "$base"; then
        options=(--system-site-packages)
    fi
    _minidp_say "making $1 with $("$base" --version)"
    "$base" -m venv --clear ${options[@]+"${options[@]}"} "$1"
}

# Says what begins now, and after how many seconds. Also where nobody sits at a terminal:
# on a busy machine an import of torch takes longer than anybody waits without a word.
_minidp_say() {
    printf '%4d s  %s\n' "$SECONDS" "$*" >&2
}

# Installs torch for the interpreter $1.  Without an NVIDIA GPU a pinned version, which
# a CPU-only index can serve; with one the newest that pip finds.
_minidp_install_torch() {
    local wanted=torch==2.13.0
    if command -v nvidia-smi >/dev/null 2>&1; then
        wanted='torch>=2.12'
    fi
    _minidp_say "installing ${MINIDP_TORCH:-$wanted}: one or two minutes"
    "$1" -m pip install --quiet --disable-pip-version-check \
        "${MINIDP_TORCH:-$wanted}" numpy
}

minidp_environment() {
    local extras=$1 root venv stamp
    if [[ -n ${MINIDP_PYTHON:-} ]]; then
        PYTHON=$MINIDP_PYTHON
        return
    fi
    root=$(_minidp_root) || return 1
    venv=$root/.venv
    PYTHON=$venv/bin/python
    _minidp_say "looking for Python and torch in $venv: some seconds"
    if ! "$PYTHON" -c '' 2>/dev/null; then
        _minidp_make_venv "$venv" || return 1
    fi
    if ! _minidp_has_torch "$PYTHON"; then
        _minidp_install_torch "$PYTHON" || return 1
    fi
    # pip takes seconds to find out that there is nothing to do; a copy of the
    # pyproject.toml it last installed from tells at once.
    stamp=$venv/minidp-installed-$extras
    if ! cmp -s "$root/pyproject.toml" "$stamp"; then
        _minidp_say "installing minidp with what ${extras//,/, } need: up to a minute"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check \
            -e "${root}[$extras]" || return 1
        cp "$root/pyproject.toml" "$stamp"
    fi
}

# Builds the C++ extension, unless it is built, or MINIDP_NATIVE=0 is set. Without a
# compiler it says in one line that minidp runs in pure Python, and succeeds.
minidp_extension() {
    _minidp_say "looking for the C++ extension; if it is not built: half a minute or two"
    (cd "$(_minidp_root)" && "$PYTHON" -m minidp.native build --optional)
}
