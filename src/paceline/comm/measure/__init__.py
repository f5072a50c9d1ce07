"""The speed of collectives and links, measured on real ranks.

Read `calls.py` first (how one call is timed).
"""
