"""Typed messages between a run's processes, which no stranger can read, send or hold up.

Read `key` (who belongs to the run), then `connection` and `listener`; `store` is the rendezvous on top of them.
"""
