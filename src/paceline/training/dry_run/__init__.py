"""One step of any plan without memory, in one process: the dry run, and the preflight before ranks are started.

Read `dry_run.py` first, then `preflight.py`.
"""
