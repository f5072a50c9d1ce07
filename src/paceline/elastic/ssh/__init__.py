"""Start of a command on several hosts by the system's ssh, `--hosts a,b:2`.

Read `starter.py` first: it starts and watches `host.py` on every host, which runs the command there.
"""
