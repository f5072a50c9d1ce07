"""Typed and authenticated messages between the processes of a run.

Unauthenticated peers cannot read, send or delay messages. Read `key` (which processes belong to the run) and `listener`
(which connections are accepted) first, then `connection`. `store` implements the rendezvous store with these modules.
"""
