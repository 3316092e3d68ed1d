"""Judge facts about one subject per file.

A check takes facts and returns one finding or several, without a name, which its caller
adds: `doctor.command` for a job, `doctor.script` for a script. `environment`, `network`
and `variables` need one process, `ranks` compares facts of all ranks, `collectives`
communicates; `model`, `loader` and `training` look at a script.
"""
