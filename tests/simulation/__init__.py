"""Simulated ranks: the real minidp, in one process, in every order of events, by seed.

Tests with real processes find a race by luck. Here all ranks are threads of this
process, of which exactly one runs, and a tape of integers makes every choice: who goes
on at each seam, when a message arrives, what goes wrong where. A seed is a tape, so a
failure is a number::

    python -m tests.simulation                     look for something, in all scenarios
    python -m tests.simulation reset --runs 10000  in one of them
    python -m tests.simulation reset --seed 17     play one run, and tell all of it
    python -m tests.simulation.mutants             old races and hangs are found
    python -m tests.simulation.own MODULE:FUNCTION a training function of your own

A rank comes to a seam where it starts a collective or waits for it, asks the store,
sleeps, waits for an event or a thread, or where a scenario says so (`Rank.point`).
Everything of minidp that waits for others asks `minidp.world`, stores, or groups, which
the simulation replaces. Nothing else is replaced, and nothing is patched but torch's
own table of groups, which torch means to be replaced. A user's function asks more: for
it `own` also patches `time`, futures, and the functions that make groups.

Read the files in this order::

    tape         all choices, as a row of integers
    scheduler    exactly one thread runs; the clock; deadlocks
    lines        which line of the script something has come from
    store        the key-value store
    network      groups, and their collectives
    world        what `minidp.world` asks
    faults       what may go wrong
    training     the model, and what must come out
    play         one run
    lighthouse   torchft: which replicas are in a quorum
    replicas     torchft: its manager, on this lighthouse and network
    checks       what must hold after each run
    scenarios/   what the ranks do
    seeds        what tests expect of some seeds
    mutants      old races and hangs, put back
    own          a training function of your own

What is not simulated: the extension and shared memory (pure Python only), devices and
their streams, sparse gradients, the end of an interpreter, two threads of one rank that
meet between seams. Groups are Gloo's: matched by order, results in any order.
"""
