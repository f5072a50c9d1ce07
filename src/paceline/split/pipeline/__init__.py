"""Pipeline parallelism: a model cut into stages, and the schedules that keep them busy.

Read `pipeline.py` first, then `stages.py`, then `cut_model.py` and `forward_trace.py` (where a model can be cut).
"""
