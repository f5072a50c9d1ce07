"""Supervision of a run: starting, watching, replacing and ending ranks, without torch.

Read `membership.py` first: it holds every transition of a run's membership, without processes, sockets or clocks. Then
read `attempt.py` (start and watch), `ranks.py` (the processes) and `recovery.py`, which carries out decisions. Imports
go in one direction: `attempt` imports `recovery` and `independent`; these import `ranks`, which imports `hosts/`,
`forkserver` and `place`. Torch and the packages above must not be imported here.

A *generation* is the list of processes that train together. The supervisor reports events to `Membership`. `Membership`
answers with the current generation, and sometimes with a wanted generation, which begins after a step::

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

    held (too few hosts), or no whole replica: the next generation has no members. All processes wait with their state,
    and note() begins a generation as soon as enough of them have arrived.

A *process* is starting, joining, a member, left out (lost too often, or released), or away (its host may come back)::

    starting --> joining --> member --> lost --> starting            lost too often: left out
                                |
                                +--> released --> left out --> take_back() --> starting
                                +--> leave_out(away), with its host --> come_back() --> starting

In the ranks, `Member` (also in `membership.py`) enters generations, and `newest_of` decides from which step boundary
the members continue. `benchmarks/interleavings.py` plays both sides in virtual time.

Several hosts (`hosts/`): one *coordinator* decides, and an *agent* on every other host starts and watches ranks for it.
If the coordinator is lost, the agents meet again, and `hosts/takeover.py` chooses the next coordinator. The lock
of the run directory (`leadership.py`) fences the previous one.
"""
