"""Typed messages between a run's processes, which unauthenticated peers cannot read, send or delay.

Read `key` (which processes belong to the run) and `listener` (which connections are accepted), then `connection`;
`store` is the rendezvous on top.
"""
