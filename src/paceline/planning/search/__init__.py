"""Search over all plans of a job: branch and bound on the cost model.

Read `search.py` first, then `space.py` (the set of plans) and `bounds.py` (lower bounds on step times).
"""
