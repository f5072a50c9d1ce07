"""Host processes of one command: host 0 coordinates, and all other hosts run agents.

Read `over_hosts` first, then `gather` (how hosts connect), `hosts` (the coordinator's view) and `agent`. `takeover`
replaces a lost coordinator and readmits lost hosts.
"""
