"""Pass options of the constructor from outside the script.

    MINIDP_UNSYNCED=warn torchrun ... train.py    # or: minidp run --unsynced warn

An environment variable replaces what the script passes, in every process that inherits
it. ``minidp run`` and ``minidp tune`` have an option for each variable and set it.
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
    """Parse a number; "auto" stays, "none" becomes None; ValueError for other words."""
    if text in (AUTO, NONE):
        return None if text == NONE else text
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"expected a number, but got {text!r}") from None


class Option(NamedTuple):
    """An argument of the constructor that the environment or a command line can set."""

    name: str
    help: str
    metavar: str = ""  # empty: a flag

    @property
    def variable(self) -> str:
        """Return the environment variable's name: MINIDP_ and the name in capitals."""
        return PREFIX + self.name.upper()

    @property
    def word(self) -> str:
        """Return the command-line option, for example ``--static-graph``."""
        return "--" + self.name.replace("_", "-")

    def read(self, text: str) -> Any:
        """Return the value that ``text`` stands for.

        ValueError or TypeError if the constructor would refuse it. A file for
        ``bucket_layout`` is not opened.
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
        "what to do when an optimizer would apply gradients that differ between ranks",
        "|".join(get_args(Unsynced)),
    ),
    Option(
        "hang_timeout",
        "how long a collective may wait for other ranks; none: the group's limit",
        "SECONDS",
    ),
    Option(
        "check_replicas_every",
        "how often checksums of the replicas are compared; 0 is never",
        "STEPS",
    ),
    Option(
        "check_finite_grads",
        "raise, naming the parameter, when a gradient holds NaN or infinity",
    ),
    Option(
        "bucket_layout",
        "a file that minidp tune wrote; of a second model FILE with .1 before its end",
        "FILE",
    ),
    Option(
        "bucket_cap_mb",
        "bucket limit; auto: try layouts, and keep the fastest; none: torch's",
        "MIB",
    ),
    Option("bucket_cap_mb_list", "limits of buckets; the last repeats", "MIB,MIB,..."),
    Option("find_unused_parameters", "parameters may get no gradient in some steps"),
    Option("skip_all_reduce_unused_params", "do not reduce buckets that no rank uses"),
    Option("static_graph", "every iteration uses the same parameters equally often"),
    Option("gradient_as_bucket_view", ".grad are views of the buckets (saves memory)"),
    Option("batched_grad_copy", "divide a whole bucket at once, not each gradient"),
    Option("forward_sync_buffers", "broadcast module buffers before forwards"),
    Option(
        "average_over",
        "items: divide by the items that ranks count, not by the number of ranks",
        "|".join(get_args(AverageOver)),
    ),
)
OPTIONS = {option.name: option for option in _TABLE}
# Every variable that minidp reads; one that resembles them is a spelling mistake.
VARIABLES = {option.variable: option.help for option in OPTIONS.values()} | {
    "MINIDP_NATIVE": "whether to load the C++ extension: auto, build, 0 or 1",
    "MINIDP_NATIVE_CACHE": "the folder for the extension's binaries",
    "MINIDP_SHARED_MEMORY": "0: ranks of one host send messages; 1: they must not",
    RUN: "set by minidp run, in a script and all that it starts",
    "MINIDP_PYTHON": "of examples/quickstart.sh and tests/run.sh: the interpreter",
    "MINIDP_TORCH": "of examples/quickstart.sh and tests/run.sh: the torch to install",
}


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options set by environment variables: value by argument name.

    Empty ones count as unset. Raises ValueError, naming the variable, if the
    constructor would refuse a value.
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
    """Return arguments (by name) from the environment, to replace the script's.

    Call once for each constructed model: a counter selects its ``bucket_layout`` file.
    A cap replaces a list of caps, too, and a list a cap. Raises as `read_environment`;
    warns as `_layout_of_next`, and of misspelt variables.
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
    """Count a model that asks for layout file ``text``; return the path of its own.

    See `numbered`. None, uncounted, if ``text`` is "none"; None and a warning if a
    second or later model's file is missing. The first one's path is returned in any
    case.
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
    """Return a model's file: ``path`` for number 0, else NAME.1.json and so on."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path


@contextmanager
def setting(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block, child processes included; restore."""
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
    """Log, once per process, and on one rank per host, what `misspelt` finds.

    ``minidp run`` has said it already, where it runs the script.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and RUN not in os.environ:
        for text in misspelt():
            logger.warning("%s", text)


def add_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a command-line option for each `Option` whose name is not in ``without``."""
    group = parser.add_argument_group(
        "options of the constructor",
        "For each model that the script wraps, instead of what the script passes. Or\n"
        f"as environment variables: {OPTIONS['hang_timeout'].variable}=1800, "
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
    """Parse for argparse: return ``text``, or the absolute path of a layout file.

    ArgumentTypeError if the constructor would refuse it, or there is no such file.
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
    """Return the given command-line options as environment variables: text by name."""
    given = {o.variable: getattr(options, o.name, None) for o in OPTIONS.values()}
    return {name: _text(v) for name, v in given.items() if v is not None}


def _text(value: object) -> str:
    """Return an option's value as an environment variable has it; a bool as 0 or 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)


_swapped = False  # torch's class is swapped: the script need not know minidp's


def note_swapped(*, is_swapped: bool) -> None:
    """Store whether torch's class is swapped, so that errors name variables to set."""
    global _swapped  # one process, one torch
    _swapped = is_swapped


def passing(**option: object) -> str:
    """Return, for an error's remedy, how to pass one option: "pass name=value".

    But under ``minidp run`` name its flag; else, if torch's class is swapped, its
    environment variable: such a script does not call our constructor.
    """
    ((name, value),) = option.items()
    return _from_outside(OPTIONS[name], value) or f"pass {name}={value!r}"


def aside(**option: object) -> str:
    """Return " (here: HOW)" if `passing` names a flag or a variable, else ""."""
    ((name, value),) = option.items()
    how = _from_outside(OPTIONS[name], value)
    return how and f" (here: {how})"


def _from_outside(option: Option, value: object) -> str:
    """Return how to pass an option from outside the script, as a text, or "".

    Its flag under minidp run; else its variable if torch's class is swapped; else "".
    """
    if RUN in os.environ:
        command = json.loads(os.environ[RUN])["command"]
        words = f"{option.word} {_text(value)}" if option.metavar else option.word
        if value is False:
            words = words.replace("--", "--no-")
        return f"start with `minidp {command} {words}`"
    given = f"{option.variable}={_text(value)}"
    return f"set {given} in the environment" if _swapped else ""
