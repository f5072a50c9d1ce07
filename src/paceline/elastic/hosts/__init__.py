"""Host processes: the same command on every host; host 0 coordinates, the others serve.

Read `over_hosts` first, then `gather` (they meet), `hosts` (what the coordinator holds) and `serve`.
"""
