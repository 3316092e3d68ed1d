"""Search the fastest layout while replicas come and go (``bucket_cap_mb="auto"``).

    step s          the quorum is another one than before: the search begins anew
    s + 1 .. s + 6  trial 0, with torch's layout
    s + 7           participating rank 0 decides; what is next travels, see `agreement`
    s + 8 .. s + 13 trial 1
    ...

Trial, its first step and its quorum are a part of the committed state. So all replicas
know the same, and only times of one group are compared.
"""

from __future__ import annotations

import logging
from typing import Any

from minidp.autotune import NUM_TRIALS, STEPS, Measurement
from minidp.core import Reducer
from minidp.layout import Layout, to_plain
from minidp.overlap import AUTO, AUTO_TRIES

from .agreement import Agreement

logger = logging.getLogger("minidp")


class Tuning(Agreement):
    """Let all replicas try layouts, in the first quorum that lasts, and keep the best.

    Each replica measures, because any may be the participating rank 0 that decides.
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        config, layout = reducer.queue.config, self.plan["layout"]
        self.plan |= {
            "torchs": None if config.follows_ready_order else layout,  # None: not known
            "trial": NUM_TRIALS if layout["rebuilt"] else -1,  # NUM_TRIALS: it is over
            "since": 0,  # the first step of the trial
            "quorum": None,  # the number of the one that is measured
        }
        self._measurement: Measurement | None = None
        self._decided: tuple[int, Layout] | None = None  # the last trial and its layout
        self._policy.layout_by = "" if layout["rebuilt"] else AUTO_TRIES

    def begin(self, step: int, quorum: int | None) -> bool:
        """Return whether to agree: until torch's layout is known, then as trials end.

        False once the search is over; with that layout known, also in a quorum of one
        replica, and in a new quorum, where the search begins anew, by `_restart`.
        """
        self._agreed, plan = None, self.plan
        if plan["trial"] >= NUM_TRIALS:
            return False
        if plan["torchs"] is None:
            return True
        if quorum not in (None, plan["quorum"]):
            self._restart(step, quorum)
        is_measured = quorum is not None and quorum == plan["quorum"]
        return is_measured and step >= plan["since"] + STEPS

    def _restart(self, step: int, quorum: int | None) -> None:
        """Store a plan that begins the search anew, in ``quorum``, after ``step``.

        `follow` uses it if ``step`` is committed. Its layout is torch's.
        """
        start = {"trial": 0, "since": step + 1, "quorum": quorum}
        self._agreed = step, self.plan | start | {"layout": self.plan["torchs"]}

    def proposal(self) -> Layout | None:
        """Return torch's layout if no plan has it yet, else that of the next trial.

        After the last trial, the fastest. Decided once per trial: that ends a trial's
        measurement. None without a ready order, or without measurements.
        """
        if self.plan["torchs"] is None:
            return super().proposal()
        trial = self.plan["trial"] + 1
        if self._measurement is not None and (self._decided or (0,))[0] != trial:
            now = self._reducer.queue.layout
            self._decided = trial, self._measurement.decide(trial, now)[0]
        return self._decided[1] if self._decided else None

    def agree(self, step: int, quorum: int | None, layout: Layout | None) -> None:
        """Store ``layout``, rank 0's proposal, for the next trial if ``step`` commits.

        The first one is torch's, and begins no trial. None: begin the search anew, in
        ``quorum``; if torch's layout is not known yet, do nothing.
        """
        trial, is_first = self.plan["trial"] + 1, self.plan["torchs"] is None
        if layout is None:
            if not is_first:
                self._restart(step, quorum)
            return
        stays = trial >= NUM_TRIALS
        plain = to_plain(layout, self._reducer.queue.specs, rebuilt=stays)
        more: dict[str, Any] = {"trial": trial, "since": step + 1}
        if is_first:
            more = {"torchs": plain}
        self._agreed = step, self.plan | more | {"layout": plain}

    def adopt(self, plan: dict[str, Any]) -> None:
        """Do as in `Agreement`; measure from trial 0 on, until a layout stays.

        A plan of trial 0 drops earlier measurements, and is logged.
        """
        super().adopt(plan)
        if plan["trial"] in (0, NUM_TRIALS):
            if self._measurement is not None:
                self._measurement.stop()
            self._measurement = self._decided = None
        if plan["trial"] == 0:
            queue, hooks = self._reducer.queue, self._reducer.hooks
            self._measurement = Measurement(queue, hooks, queue.layout)
            text = 'bucket_cap_mb="auto" tries layouts from step %d on in this quorum.'
            logger.info(text, plan["since"])
        is_over = plan["trial"] >= NUM_TRIALS
        self._policy.layout_by = AUTO if is_over else AUTO_TRIES
