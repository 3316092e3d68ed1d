"""Find what is wrong with a machine, a job or a training script (``minidp doctor``).

As a command, for the machine and the job; in a script, for model, loader, training::

    torchrun --nproc-per-node 2 -m minidp.doctor

    from minidp import doctor
    doctor.check_model(model, batch)
    doctor.check_loader(loader)
    with doctor.watch(model, loader) as watched:
        train_two_epochs()

No check raises or hangs: both become findings. Read `findings` (the result of a check;
table, JSON), `checks` (one file per subject: what is wrong, and what to do), `command`
(runs the checks of ``minidp doctor``), `timebox` (a time limit for each), `meeting`
(facts through the store, without a collective), `script` (check_model, check_loader,
watch), `training_log` (what a training loop does), `words` (lists and errors as text).
"""

from .command import add_arguments, main
from .findings import Finding, Report, Status
from .script import Watched, check_loader, check_model, watch

__all__ = ["Finding", "Report", "Status", "Watched", "add_arguments"]
__all__ += ["check_loader", "check_model", "main", "watch"]
