"""Find what is wrong with a machine, a job or a training script (``minidp doctor``).

It is a command for the machine and the job, and in a script it checks model and loader:

    torchrun --nproc-per-node 2 -m minidp.doctor

    from minidp import doctor
    doctor.check_model(model, batch)
    doctor.check_loader(loader)
    with doctor.watch(model, loader) as watched:
        train_two_epochs()

A check may find a machine on which something hangs or raises. So no check hangs or
raises itself: both become findings.

Read the files in this order. `findings` is the result of a check, and how it is shown.
`checks` has one file per subject, which says what is wrong and what to do. `command`
runs the checks of ``minidp doctor``, each with the time limit of `timebox`, and the
ranks exchange facts through `meeting`, without a collective. `script` has the checks
inside a script, `training_log` notes what a training loop does. `words` makes texts of
lists and errors.
"""

from .command import add_arguments, main
from .findings import Finding, Report, Status
from .script import Watched, check_loader, check_model, watch

__all__ = ["Finding", "Report", "Status", "Watched", "add_arguments"]
__all__ += ["check_loader", "check_model", "main", "watch"]
