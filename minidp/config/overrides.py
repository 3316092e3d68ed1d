"""Pass options of the constructor from outside the script.

    MINIDP_UNSYNCED=warn torchrun ... train.py    # or: minidp run --unsynced warn

This is for scripts that nobody wants to edit, and for trainers that wrap the model
themselves. An environment variable replaces what the script passes, in every process
that inherits it. ``minidp run`` and ``minidp tune`` have a flag for each of these
variables; the flag sets the variable for the processes of the script.

A misspelt variable would be ignored in silence, so that the user would believe in an
option that is not set. Therefore `VARIABLES` lists every name that minidp reads, and a
name that resembles one of them is logged.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

from .options import AUTO, AverageOver, OwnOptions, Unsynced, bucket_caps

logger = logging.getLogger("minidp")
PREFIX, NONE = "MINIDP_", "none"
RUN = "MINIDP_RUN"  # set in a script under `minidp run`, and all that it starts
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_NUMBERS = ("SECONDS", "STEPS", "MIB")  # metavars


def _number(text: str) -> Any:
    """Parse a number, where "auto" stays as it is, and "none" becomes None.

    Raises:
        ValueError: It is any other word.
    """
    if text in (AUTO, NONE):
        return None if text == NONE else text
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"expected a number, but got {text!r}") from None


class Option(NamedTuple):
    """An argument of the constructor that the environment or a command line can set."""

    name: str
    help: str  # for --help, and for the table of variables in minidp/run/README.md
    metavar: str = ""  # of its value, in --help; "": the option is true or false

    @property
    def variable(self) -> str:
        """The name of the environment variable, for example MINIDP_STATIC_GRAPH."""
        return PREFIX + self.name.upper()

    @property
    def word(self) -> str:
        """The flag of the command line, for example ``--static-graph``."""
        return "--" + self.name.replace("_", "-")

    def read(self, text: str) -> Any:
        """Return the value that ``text`` stands for.

        A file for ``bucket_layout`` is not opened.

        Raises:
            ValueError, TypeError: The constructor would refuse this value.
        """
        value: Any = text
        if not self.metavar:
            if text.lower() not in _FLAGS:
                raise ValueError(f"expected one of {', '.join(_FLAGS)}")
            value = _FLAGS[text.lower()]
        elif self.metavar in _NUMBERS:
            value = _number(text)
        elif self.name == "bucket_cap_mb_list":
            value = None if text == NONE else [_number(cap) for cap in text.split(",")]
        if self.name in OwnOptions.__dataclass_fields__:
            OwnOptions(**{self.name: value})
        elif self.name.startswith("bucket_cap_mb"):
            bucket_caps(0, **{self.name: value})
        return value


_TABLE = (
    Option(
        "unsynced",
        "what to do when an optimizer is about to apply gradients that differ between "
        "ranks",
        "|".join(get_args(Unsynced)),
    ),
    Option(
        "hang_timeout",
        "how many seconds a collective may wait for other ranks, until an error names "
        "the missing one; none: only the limit of the process group counts",
        "SECONDS",
    ),
    Option(
        "check_replicas_every",
        "compare checksums of the replicas every so many steps; 0: never",
        "STEPS",
    ),
    Option(
        "check_finite_grads",
        "raise an error that names the parameter when a gradient holds NaN or infinity",
    ),
    Option(
        "bucket_layout",
        "start with the buckets in this file, which minidp tune has written; for a "
        "second model of the script it is FILE with .1 before its suffix",
        "FILE",
    ),
    Option(
        "bucket_cap_mb",
        "the size at which a bucket is full; auto: try several layouts, and keep the "
        "fastest; none: torch's default",
        "MIB",
    ),
    Option(
        "bucket_cap_mb_list",
        "such a size for each bucket; the last one holds for all further buckets",
        "MIB,MIB,...",
    ),
    Option(
        "find_unused_parameters",
        "allow parameters that get no gradient in some steps",
    ),
    Option(
        "skip_all_reduce_unused_params",
        "do not reduce a bucket in a step in which no rank uses its parameters",
    ),
    Option(
        "static_graph",
        "promise that every step uses the same parameters equally often",
    ),
    Option(
        "gradient_as_bucket_view",
        "make each .grad a view of its bucket, which saves memory",
    ),
    Option(
        "batched_grad_copy",
        "divide a whole bucket at once instead of each of its gradients",
    ),
    Option(
        "forward_sync_buffers",
        "broadcast module buffers (such as running means) before forwards",
    ),
    Option(
        "average_over",
        "items: divide by the number of items that all ranks have counted, instead of "
        "the number of ranks",
        "|".join(get_args(AverageOver)),
    ),
)
OPTIONS = {option.name: option for option in _TABLE}
# Every variable that minidp reads. One that resembles them is a spelling mistake.
VARIABLES = {option.variable: option.help for option in OPTIONS.values()} | {
    "MINIDP_NATIVE": "whether to load the C++ extension: auto (if it is built), build "
    "(build it first), 0 (no) or 1 (fail without it)",
    "MINIDP_NATIVE_CACHE": "the folder for the extension's binaries",
    "MINIDP_SHARED_MEMORY": "0: ranks of one host send messages instead of sharing "
    "memory; 1: an error says so if they cannot share it",
    RUN: "set by minidp run for the script and all that it starts; do not set it",
    "MINIDP_PYTHON": "the interpreter for examples/quickstart.sh and tests/run.sh",
    "MINIDP_TORCH": "the torch that examples/quickstart.sh and tests/run.sh install",
}


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options that environment variables set: value by argument name.

    A variable that is empty counts as unset.

    Raises:
        ValueError: The constructor would refuse a value; the text names the variable.
    """
    found = {}
    for name, option in OPTIONS.items():
        if text := environment.get(option.variable):
            try:
                found[name] = option.read(text)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{option.variable}={text}: {error}") from None
    return found


def replacements() -> dict[str, Any]:
    """Return the arguments, by name, that replace those of the script.

    Call it once for each model that is wrapped, because each has a ``bucket_layout``
    file of its own, which a counter selects. It logs variables that look misspelt.

    Raises:
        ValueError: As `read_environment` raises it.
    """
    _tell_misspelt()
    given = read_environment()
    # The caps are given as a number or as a list: one replaces the other.
    if "bucket_cap_mb" in given:
        given.setdefault("bucket_cap_mb_list", None)
    elif given.get("bucket_cap_mb_list"):
        given["bucket_cap_mb"] = None
    if "bucket_layout" in given:
        given["bucket_layout"] = _layout_of_next(given["bucket_layout"])
    return given


_num_models: Counter[str] = Counter()  # models that asked for a layout, by file


def _layout_of_next(text: str) -> str | None:
    """Return the layout file of the next model that asks for file ``text``.

    It is None for "none". It is also None, with a warning, if a second or later model
    has no file: a script may wrap more models than ``minidp tune`` has seen. The path
    of the first one is returned even if it is missing, so that the constructor raises.
    """
    if text == NONE:
        return None
    number = _num_models[text]
    _num_models[text] += 1
    path = numbered(Path(text), number)
    if number and not path.exists():
        told = "There is no %s: model number %d of this process keeps torch's layout."
        logger.warning(told, path, number + 1)
        return None
    return str(path)


def numbered(path: Path, number: int) -> Path:
    """Return the file of a script's model ``number``: NAME.json, NAME.1.json ..."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path


@contextmanager
def setting(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, also for processes started there."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def misspelt(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a text for each unknown MINIDP_ variable that resembles a known one."""
    return [
        f"minidp has no variable {name}; did you mean {similar}?"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in VARIABLES
        for similar in difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
    ]


@functools.cache
def _tell_misspelt() -> None:
    """Log what `misspelt` finds, once per process and on one rank per host.

    Under ``minidp run`` nothing is logged, because the command itself has said it.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and RUN not in os.environ:
        for text in misspelt():
            logger.warning("%s", text)


def add_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for each of the `OPTIONS` whose name is not in ``without``."""
    group = parser.add_argument_group(
        "options of the constructor",
        "These hold for each model that the script wraps, and replace what the script\n"
        "passes. As environment variables they are "
        f"{OPTIONS['hang_timeout'].variable}=1800,\n"
        f"{OPTIONS['static_graph'].variable}=1, and so on.",
    )
    for option in OPTIONS.values():
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if option.metavar:
            kind = {
                "metavar": option.metavar,
                "type": functools.partial(_checked, option),
            }
        if option.name not in without:
            group.add_argument(option.word, help=option.help, **kind)


def _checked(option: Option, text: str) -> str:
    """Check a flag's value for argparse, and return the text for the variable.

    The path of a layout file becomes absolute.

    Raises:
        ArgumentTypeError: The constructor would refuse it, or there is no such file.
    """
    try:
        option.read(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if option.name != "bucket_layout" or text == NONE:
        return text
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return str(Path(text).absolute())  # the script may change its directory


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the flags that were given as environment variables: text by name."""
    given = {o.variable: getattr(options, o.name, None) for o in OPTIONS.values()}
    return {name: _text(v) for name, v in given.items() if v is not None}


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


_swapped = False  # whether torch's class is ours: the script may not know minidp then


def note_swapped(*, is_swapped: bool) -> None:
    """Note whether torch's class is ours now, in which case `passing` names variables.

    A script whose class is swapped does not call our constructor.
    """
    global _swapped  # one process, one torch
    _swapped = is_swapped


def passing(**option: object) -> str:
    """Say how to pass one option, for an error's remedy: "pass name=value".

    A script under ``minidp run``, or one whose torch class is swapped, does not call
    our constructor. For such a script the text names the flag or the variable.
    """
    ((name, value),) = option.items()
    return _from_outside(OPTIONS[name], value) or f"pass {name}={value!r}"


def hint_from_outside(**option: object) -> str:
    """Return " (here: HOW)" if the option has to be passed from outside, else ""."""
    ((name, value),) = option.items()
    how = _from_outside(OPTIONS[name], value)
    return how and f" (here: {how})"


def _from_outside(option: Option, value: object) -> str:
    """Say how to pass an option to a script that does not call our constructor.

    The text is "" for all other scripts.
    """
    if RUN in os.environ:
        command = json.loads(os.environ[RUN])["command"]
        words = f"{option.word} {_text(value)}" if option.metavar else option.word
        if value is False:
            words = words.replace("--", "--no-")
        return f"start with `minidp {command} {words}`"
    given = f"{option.variable}={_text(value)}"
    return f"set {given} in the environment" if _swapped else ""
