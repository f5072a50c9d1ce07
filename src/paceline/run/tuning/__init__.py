"""Tuning: trials that measure plans, and the calibration of this machine.

Read `auto.py` first, then `trial.py` (which runs on the ranks), then `calibrate.py`.
"""
