"""Typed, authenticated messages between a run's processes.

Unauthenticated peers cannot read, send or delay messages. Read `key` (which processes belong to the run) and `listener`
(which connections are accepted), then `connection`; `store` is the rendezvous store on top of them.
"""
