"""Host processes: the one command on every host, of which host 0 coordinates and the others serve.

Read `over_hosts` first, then `coordinator` and `serve`.
"""
