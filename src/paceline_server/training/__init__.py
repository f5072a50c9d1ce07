"""Training with parameter servers: workers compute pieces of global batches at their own speed.

Read `loop` (the first worker, which also evaluates, saves and records), then `worker`. `run` starts each process.
"""
