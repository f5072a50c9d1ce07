"""Measurements that choose a plan: trials of plans and settings, and the calibration of this machine.

Read `auto.py` first, then `trial.py` (what the ranks do), then `calibrate.py`.
"""
