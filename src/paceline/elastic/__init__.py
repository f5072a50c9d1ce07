"""Supervision of a run: start, monitoring, replacement and end of its ranks, without torch.

Read `membership.py` first: it defines every transition of a run's membership, without processes, sockets or clocks.
Then read `attempt.py` (start and monitoring), `ranks.py` (the processes) and `recovery.py` (which carries out the
decisions of `Membership`). Imports go in one direction: `attempt` imports `recovery` and `independent`; these import
`ranks`, which imports `hosts/`, `forkserver` and `place`. This package must not import torch or higher-level packages.

A *generation* is the list of processes that train together. The supervisor reports events to `Membership`. `Membership`
returns the current generation, and sometimes a wanted generation, which begins after a step::

                       all replicas, or those that are there
                                        |
                                        v
      lost(), lost_together()     +-----------+     note(): a replica waits to join,
    +-----------------------------|  current  |-----------------------------+   or is released
    |  members break off the step +-----------+  members finish the step    |
    v                                ^     ^                                v
    next generation, without the ----+     +---- note(): all members -- +--------+
    replicas that lost a process                 have entered it        | wanted |
                                                                        +--------+

    If too few hosts are present (held), or no replica is whole, the next generation has no members. All processes then
    wait and keep their state. note() begins a generation as soon as enough processes have arrived.

A *process* is starting, joining, a member, left out (lost too often, or released), or away (its host may come back)::

    starting --> joining --> member --> lost --> starting            lost too often: left out
                                |
                                +--> released --> left out --> take_back() --> starting
                                +--> leave_out(away), with its host --> come_back() --> starting

In the ranks, `Member` (also in `membership.py`) enters generations, and `newest_of` chooses the step boundary from
which the members continue. `benchmarks/interleavings.py` simulates the launcher and the ranks in virtual time.

With several hosts (`hosts/`), one *coordinator* decides, and an *agent* on every other host starts and monitors the
ranks of that host. If the coordinator is lost, the agents connect to one another, and `hosts/takeover.py` chooses the
next coordinator. The lock of the run directory (`leadership.py`) fences off the previous coordinator.
"""
