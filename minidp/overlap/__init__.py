"""Analyse recorded steps: is communication hidden behind the backward, if not, why?

Read `timeline` (recorded steps, as data), `stopwatch` (records the steps of a reducer),
`analysis` (what is hidden, what is exposed, which step is typical), `skew` (the ranks
on one clock; which rank is late), `forecast` (what another layout would gain; `analyse`
returns all numbers of a run), `advice` (what to change), `text` (the report), `chrome`
(traces), `page` (the report, the steps and a forecast as one HTML file).
"""

from .chrome import chrome_trace
from .forecast import Analysis, analyse
from .page import html_page
from .skew import aligned, compare_clocks
from .stopwatch import Stopwatch
from .text import report
from .timeline import (
    AUTO,
    AUTO_TRIES,
    ClockOffset,
    Param,
    Step,
    Timeline,
    Where,
    from_json,
    to_json,
)

__all__ = ["AUTO", "AUTO_TRIES", "Analysis", "ClockOffset", "Param", "Step"]
__all__ += ["Stopwatch", "Timeline", "Where", "aligned", "analyse", "chrome_trace"]
__all__ += ["compare_clocks", "from_json", "html_page", "report", "to_json"]
