"""Secure aggregation: a server learns the sum of updates, and none of them alone.

Read `client` and `server`, the two ends of the protocol, without sockets; `masks`, `shares` and `fixed_point` are what
they compute with.
"""
