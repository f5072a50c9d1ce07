"""Measurements of the speed of collectives and links on real ranks.

Read `calls.py` first, which times one call.
"""
