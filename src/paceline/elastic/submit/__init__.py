"""`paceline submit`: a run's script or manifest for a cluster's scheduler.

Read `scheduler.py` first: what each scheduler does. `slurm.py` is the shortest whole one; `table.py` has all of them.
"""
