"""Host processes: the same command on every host; host 0 coordinates, the others are its agents.

Read `over_hosts` first, then `gather` (they meet), `hosts` (what the coordinator holds) and `agent`. `takeover` replaces
a lost coordinator, and `returns` takes lost hosts back.
"""
