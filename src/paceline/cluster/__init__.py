"""Clusters on which jobs run: hosts, their devices, and the links between them.

Read `host.py` and `cluster.py` first, then `machine.py`. `launch_engines.py` detects the launcher that started this
process. This package must not import jobs, plans or runs.
"""
