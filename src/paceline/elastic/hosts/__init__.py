"""Host processes of one command: host 0 coordinates, the others are its agents.

Read `over_hosts` first, then `gather` (they meet), `hosts` (what the coordinator holds) and `agent`. A lost coordinator
is replaced in `takeover`, where lost hosts also come back.
"""
