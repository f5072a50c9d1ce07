"""Other training systems beside paceline, on one job: `paceline bench job.yaml --systems ddp,fsdp,…`.

Read first `system.py`, the protocol, then `plain.py` and `ddp.py`: a script of one process, and the lines that a system
changes in it. `compare.py` starts them in turn.
"""
