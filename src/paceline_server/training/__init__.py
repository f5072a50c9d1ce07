"""Training with parameter servers: workers take microbatches of the global batches at their own speed.

Read `loop` (the first worker, which also measures, saves and records), then `worker`; `run` starts each process.
"""
