"""The dry run of a plan in one process, and the preflight before ranks start.

Read `dry_run.py` first, then `preflight.py`.
"""
