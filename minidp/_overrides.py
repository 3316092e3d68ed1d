"""Options of the constructor that a user gives from outside the script.

    MINIDP_UNSYNCED=warn torchrun ... train.py    # or: minidp run --unsynced warn

What an environment variable says replaces what the script passes, in every process
that inherits it. ``minidp run`` has an option for each, which sets the variable.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from .config import AUTO, Safety, Unsynced, bucket_caps

logger = logging.getLogger("minidp")
PREFIX, NONE = "MINIDP_", "none"
RUN = "MINIDP_RUN"  # set in a script under `minidp run`, and all that it starts
OWN = ("MINIDP_NATIVE", "MINIDP_PYTHON", "MINIDP_TORCH")  # of the build, of examples/
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Option:
    """One argument of the constructor."""

    name: str
    metavar: str  # empty: a flag
    help: str
    read: Callable[[str], Any]

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def word(self) -> str:
        """The option of ``minidp run``."""
        return "--" + self.name.replace("_", "-")

    def value(self, text: str) -> Any:
        """What a text stands for.

        Raises:
            ValueError: nothing that the constructor takes.
        """
        try:
            return self.read(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.variable}={text}: {error}") from None


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(f"expected one of {', '.join(_FLAGS)}")
    return _FLAGS[text.lower()]


def _number(text: str) -> float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"expected a number, but got {text!r}") from None


def _unless_none(text: str, read: Callable[[str], Any]) -> Any:
    return None if text == NONE else read(text)


def _auto_or_number(text: str) -> Any:
    return text if text == AUTO else _number(text)


def _bucket_cap_mb(text: str) -> float | str | None:
    cap: float | str | None = _unless_none(text, _auto_or_number)
    bucket_caps(cap, None, 0)
    return cap


def _bucket_cap_mb_list(text: str) -> list[float] | None:
    caps = _unless_none(text, lambda text: [_number(cap) for cap in text.split(",")])
    bucket_caps(None, caps, 0)
    return caps  # type: ignore[no-any-return]


def _safety(name: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        return getattr(Safety(**{name: read(text)}), name)

    return checked


OPTIONS = {
    option.name: option
    for option in (
        Option(
            "unsynced",
            "|".join(get_args(Unsynced)),
            "what to do when an optimizer is about to apply gradients that differ "
            "between ranks",
            _safety("unsynced", str),
        ),
        Option(
            "hang_timeout",
            "SECONDS",
            "how long a collective may wait for other ranks; none: the group's limit",
            _safety("hang_timeout", lambda text: _unless_none(text, _auto_or_number)),
        ),
        Option(
            "check_replicas_every",
            "STEPS",
            "how often checksums of the replicas are compared; 0 is never",
            _safety("check_replicas_every", _auto_or_number),
        ),
        Option(
            "check_finite_grads",
            "",
            "raise, naming the parameter, when a gradient holds NaN or infinity",
            _flag,
        ),
        Option(
            "bucket_layout",
            "FILE",
            "what minidp tune wrote; of a second model FILE with .1 before its suffix",
            str,
        ),
        Option(
            "bucket_cap_mb",
            "MIB",
            "bucket limit; auto: try layouts, and keep the fastest; none: torch's",
            _bucket_cap_mb,
        ),
        Option(
            "bucket_cap_mb_list",
            "MIB,MIB,...",
            "limit of each bucket, the last one repeats",
            _bucket_cap_mb_list,
        ),
        Option(
            "find_unused_parameters",
            "",
            "parameters may get no gradient in some iterations",
            _flag,
        ),
        Option(
            "skip_all_reduce_unused_params",
            "",
            "buckets that no rank uses do not travel",
            _flag,
        ),
        Option(
            "static_graph",
            "",
            "every iteration uses the same parameters equally often",
            _flag,
        ),
        Option(
            "gradient_as_bucket_view",
            "",
            ".grad are views of the buckets (saves memory)",
            _flag,
        ),
        Option(
            "batched_grad_copy",
            "",
            "divide a whole bucket at once, not each of its gradients",
            _flag,
        ),
        Option(
            "forward_sync_buffers",
            "",
            "broadcast module buffers from rank 0 before forwards",
            _flag,
        ),
    )
}


# ------------------------------------------------------------------- what is given


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Options by name, of the variables that are set and not empty.

    Raises:
        ValueError: naming a variable whose value the constructor would not take.
    """
    texts = {name: environment.get(each.variable) for name, each in OPTIONS.items()}
    return {name: OPTIONS[name].value(text) for name, text in texts.items() if text}


def replacements() -> dict[str, Any]:
    """What to use instead of what the script passes, for one more object.

    Raises:
        ValueError: see `read_environment`.
    """
    given = read_environment()
    if "bucket_cap_mb" in given:  # two ways to say the same: none is left over
        given.setdefault("bucket_cap_mb_list", None)
    elif given.get("bucket_cap_mb_list"):
        given["bucket_cap_mb"] = None
    if "bucket_layout" in given:
        given["bucket_layout"] = _layout_of_next(given["bucket_layout"])
    return given


_num_models: Counter[str] = Counter()  # that asked for a layout, by file


def _layout_of_next(text: str) -> str | None:
    """The file of the next model, as `minidp tune` names them."""
    if text == NONE:
        return None
    number = _num_models[text]
    _num_models[text] += 1
    path = numbered(Path(text), number)
    if number and not path.exists():
        logger.warning(
            "There is no %s: model number %d of this process keeps torch's layout.",
            path,
            number + 1,
        )
        return None
    return str(path)


def numbered(path: Path, number: int) -> Path:
    """The file for a model of a script, the first being number 0."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path


# -------------------------------------------------------------------- minidp run


def add_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """An option of the command line for each variable."""
    group = parser.add_argument_group(
        "options of the constructor",
        "For each model that the script wraps, instead of what the script passes. Or\n"
        f"as environment variables: {OPTIONS['hang_timeout'].variable}=1800, "
        f"{OPTIONS['static_graph'].variable}=1, and so on.",
    )
    for option in OPTIONS.values():
        if option.name in without:
            continue
        if option.metavar:
            group.add_argument(
                option.word,
                metavar=option.metavar,
                type=_argument(option),
                help=option.help,
            )
        else:
            group.add_argument(
                option.word, action=argparse.BooleanOptionalAction, help=option.help
            )


def _argument(option: Option) -> Callable[[str], str]:
    def checked(text: str) -> str:
        try:
            option.read(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if option.name != "bucket_layout" or text == NONE:
            return text
        if not Path(text).is_file():
            raise argparse.ArgumentTypeError(f"there is no file {text}")
        return str(Path(text).absolute())  # the script may go to another folder

    return checked


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables that say the same as options of `add_options`."""
    given = {name: getattr(options, name, None) for name in OPTIONS}
    return {
        OPTIONS[name].variable: str(int(value)) if isinstance(value, bool) else value
        for name, value in given.items()
        if value is not None
    }


@contextmanager
def setting(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, here and in processes that are started inside."""
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
    """A sentence for each variable that nobody reads but looks like one of ours."""
    known = [RUN, *OWN, *(option.variable for option in OPTIONS.values())]
    found = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in known:
            continue
        for similar in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            found.append(f"nobody reads {name}; did you mean {similar}?")
    return found


# ----------------------------------------------------------------------- remedies

_swapped = False  # torch's class is ours, so the script may be anybody's


def note_swapped(*, is_swapped: bool) -> None:
    """Tell `passing` whether scripts know of our class, or only of torch's."""
    global _swapped  # one process, one torch
    _swapped = is_swapped


def passing(**option: object) -> str:
    """How to give the constructor one option here: a phrase that begins with a verb."""
    ((name, value),) = option.items()
    return _from_outside(OPTIONS[name], value) or f"pass {name}={value!r}"


def aside(**option: object) -> str:
    """What to add to a text that speaks of passing the option; empty if that is so."""
    ((name, value),) = option.items()
    how = _from_outside(OPTIONS[name], value)
    return how and f" (here: {how})"


def _from_outside(option: Option, value: object) -> str:
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if RUN in os.environ:
        command = json.loads(os.environ[RUN])["command"]
        words = f"{option.word} {text}" if option.metavar else option.word
        if value is False:
            words = words.replace("--", "--no-")
        return f"start with `minidp {command} {words}`"
    return f"set {option.variable}={text} in the environment" if _swapped else ""
