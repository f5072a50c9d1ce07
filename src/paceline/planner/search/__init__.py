"""The search over all plans of a job: branch and bound on the cost model.

Read `search.py` first, then `space.py` (what there is to choose from) and `branch_and_bound.py`.
"""
