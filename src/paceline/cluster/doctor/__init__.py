"""Checks of `paceline doctor`: this machine's devices, software, links and power.

Read `checks.py` first.
"""
