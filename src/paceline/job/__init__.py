"""Training jobs: their sections, and the code that builds each section.

Read `job.py` first, then the file of the section that you change (`model.py`, `data.py`, `loss.py`, `optimizer.py`,
`stop.py`). Reading a job must not import torch. Code that needs torch is in `zoo/`, `samples.py`, `batch.py`,
`experts.py` and `loss_items.py`, which are imported only when objects are built.
"""
