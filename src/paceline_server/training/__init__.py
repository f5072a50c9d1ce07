"""Training by a parameter server: workers take pieces of the global batches as they can.

Read `loop` (the first worker's, which also measures, saves and records), then `worker`; `run` starts each process.
"""
