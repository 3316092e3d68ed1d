"""Analyse recorded steps: is communication hidden behind the backward? If not, why?

Read the files in this order. `timeline` has recorded steps as data, and `stopwatch`
records those of a reducer. `skew` puts the ranks on one clock, and says which is late.
`analysis` says what is hidden and what is exposed, and which step is typical.
`forecast` predicts what another layout would gain; its `analyse` returns all numbers of
a run. `advice` says what to change. `text` writes all this as a report, `page` as one
HTML file, and `chrome` writes the steps as a trace.
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
