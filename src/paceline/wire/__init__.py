"""Typed messages between a run's processes, which unauthenticated peers cannot read, send or delay.

Read `key` (which processes belong to the run) and `admission` (which connections are accepted), then `connection` and
`listener`; `store` is the rendezvous on top.
"""
