"""Other training systems beside paceline, on one job: `paceline bench compare job.yaml --systems ddp,fsdp,…`.

Read first `system.py`, the protocol, then `scripts.py`: a script of one process, and the lines that each system changes
in it. `table.py` names the systems; `compare.py` starts them in turn.
"""
