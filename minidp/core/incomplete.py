"""Remember that parameters hold an average which is wrong, until they are loaded.

On a device no host waits for an all-reduce. So an optimizer may have stepped with what
there was in a bucket when its all-reduce was aborted, and no later call can undo that.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class IncompleteAverages:
    """Whether a step has applied averages that an aborted all-reduce left incomplete.

    It knows by the versions of the parameters, which every write to them increases:
    whoever loads a checkpoint writes to all.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._versions: list[int] = []  # when they were found to be wrong

    def note(self) -> None:
        """Note that the parameters hold such averages now."""
        if not self._versions:
            self._versions = [param._version for param in self._params]

    def forget(self) -> None:
        """Note that the parameters are right again, because they were copied."""
        self._versions = []

    @property
    def is_noted(self) -> bool:
        """Whether `note` was called, also if parameters were loaded since."""
        return bool(self._versions)

    def is_present(self) -> bool:
        """Return whether one of the parameters is still as it was at `note`."""
        pairs = zip(self._params, self._versions, strict=False)
        return any(param._version == before for param, before in pairs)
