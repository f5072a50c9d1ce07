"""Host processes of one command: host 0 coordinates, the others are its agents.

Read `over_hosts` first, then `gather` (how hosts meet), `hosts` (the coordinator's view) and `agent`. `takeover`
replaces a lost coordinator and readmits lost hosts.
"""
