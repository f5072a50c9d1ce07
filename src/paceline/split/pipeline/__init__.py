"""Pipeline parallelism: a model cut into stages, and the schedules that keep them busy.

Read `pipeline.py` first, then `stages.py`, then `forward_trace.py` (the places where a model can be cut).
"""
