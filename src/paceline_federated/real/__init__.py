"""Federated training with real clients, each a process with data of its own.

Read `rounds` (who does what next, without sockets) first; then `serve` and `join`, the two processes, and `edge`, which
is both.
"""
