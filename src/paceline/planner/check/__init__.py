"""Why a plan cannot run a job on a cluster, said before a process starts, with the nearest plan that can.

Read `check.py` first, then `case.py` (what every check is given) and `nearest.py` (the search for another plan).
"""
