"""Run an unmodified script on minidp: the command ``minidp run``.

Read the files in this order. `command` has the options, and what happens in which
order. `script` runs a script as Python would, and `ranks` starts several ranks of it,
as torchrun does. `children` and `at_start/` swap torch's class also in the processes
that the script starts. `weights` finds out whether the ranks' weights are equal in the
end. `compare` runs a script on torch, in one of the `copies` of the working directory,
then on minidp. `apart` is for ``minidp tune``: it runs a trial in such a copy.
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
