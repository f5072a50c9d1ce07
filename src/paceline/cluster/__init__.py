"""The cluster that a job runs on: hosts, their devices, and the links between them.

Read `cluster.py` first, then `discover.py`; `launch_engines` finds the launcher that started this process.
"""
