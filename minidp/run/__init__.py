"""Run an unmodified script on minidp: the command ``minidp run``.

Read `command` (options and order; the report), `script` (run a script as Python would),
`ranks` (start the ranks, as torchrun does), `children` and `at_start/` (swap torch's
class also in processes that the script starts), `copies` (of the working directory),
`compare` (run a script on torch, in such a copy, then on minidp), `weights` (are the
ranks' weights equal in the end?), `apart` (a trial in such a copy).
"""

from .apart import NoCopyError, apart
from .children import reached_children
from .command import add_arguments, add_script, main
from .ranks import add_num_ranks, run_here, say_once, start_ranks, why_not
from .script import Script, after_wrapping

__all__ = ["NoCopyError", "apart"]
__all__ += ["Script", "add_arguments", "add_num_ranks", "add_script"]
__all__ += ["after_wrapping", "main", "reached_children", "run_here", "say_once"]
__all__ += ["start_ranks", "why_not"]
