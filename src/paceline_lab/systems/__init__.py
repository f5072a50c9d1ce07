"""Comparison with other training systems: `paceline bench compare job.yaml --systems ddp,fsdp,…`.

Read `system.py` first: it defines how a system is described. `scripts.py` has a plain PyTorch script and its variants
for the PyTorch-based systems. `table.py` lists all systems, and `compare.py` runs them in turn.
"""
