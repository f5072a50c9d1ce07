"""Runs in object stores: a working directory here, mirrored to a URL while it trains.

Read `run.py` first; `lease.py` keeps two trainings apart, `upload.py` sends, `fetch.py` brings back.
"""
