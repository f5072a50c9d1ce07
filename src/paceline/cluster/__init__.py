"""The cluster that a job runs on: hosts, their devices, and the links between them.

Read `host.py` and `cluster.py` first, then `machine.py`; `launch_engines.py` finds the launcher that started this
process. Nothing here imports jobs, plans or runs.
"""
