"""How often to compare what was doubtful, and turned out to be right, before."""

from __future__ import annotations

_NUM_EARLY = 8  # comparisons that do not make the next ones rarer


class Trust:
    """Compare less and less often while comparisons find the ranks equal.

    Sharpness-aware training, for example, moves weights and puts them back in each
    step. Each of the first changes is compared, and later ones more and more rarely,
    down to one in 64. Comparisons to which some ranks do not come cost seconds, so they
    become rare at once.
    """

    def __init__(self) -> None:
        self._interval, self._left = 1, 0
        self._num_early = _NUM_EARLY

    def is_due(self) -> bool:
        """Count a change, and return whether to compare now."""
        if self._left:
            self._left -= 1
            return False
        return True

    def note(self, *, is_decided: bool, is_usual: bool = False) -> None:
        """Count a comparison, so that the next ones become rarer.

        Args:
            is_decided: Whether all ranks came to it.
            is_usual: Whether there are no early comparisons, because such a change is
                seldom a mistake.
        """
        if is_decided and self._num_early and not is_usual:
            self._num_early -= 1
            return
        self._interval = min(self._interval * (2 if is_decided else 8), 64)
        self._left = max(self._interval - 2, 0)
