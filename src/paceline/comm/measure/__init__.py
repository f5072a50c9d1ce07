"""Measurements of the speed of collectives and links on real ranks.

Read `calls.py` first; it measures the time of a single call.
"""
