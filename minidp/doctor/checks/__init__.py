"""Judge facts about one subject per file.

A check takes facts and returns one finding or several. They have no name; the caller
adds that, which is `doctor.command` for a job, and `doctor.script` for a script.
Functions called ``judge_...`` only look at facts, those called ``check_...`` do
something to find out.

The checks of `environment`, `network` and `variables` need one process. `ranks`
compares facts of all ranks, and `collectives` communicates. `model`, `loader` and
`training` look at a script.
"""
