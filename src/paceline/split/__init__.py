"""Splits of a model over a replica's ranks: fsdp, tp, pp, cp and ep.

Read `apply.py` first, which applies all splits of a plan on one mesh. Then read the file of the axis that you change:
`fsdp.py`, `tensor_parallel.py`, `pipeline.py` (then `stages.py` and `cut_model.py`), `context_parallel.py` or
`expert.py`. Nothing here may import `paceline.engine` or `paceline.sync`.
"""
