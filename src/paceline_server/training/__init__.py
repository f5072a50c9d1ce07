"""Training with parameter servers: each worker computes pieces of global batches at its own speed.

Read `loop` (the first worker, which also evaluates, saves and records), then `worker`. `run` is the entry point of
each process.
"""
