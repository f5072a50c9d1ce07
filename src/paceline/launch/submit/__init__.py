"""`paceline submit`: the script or manifest of a run for a cluster's scheduler, and what becomes of it there.

Read `scheduler.py` first: what each scheduler does. `slurm.py` is the shortest whole one; `table.py` has all of them.
"""
