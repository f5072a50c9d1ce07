"""Comparison with other training systems: `paceline bench compare job.yaml --systems ddp,fsdp,…`.

Read `system.py` first, the protocol, then `scripts.py`: a single-process script, and the lines of it that each system
changes. `table.py` names the systems; `compare.py` starts them in turn.
"""
