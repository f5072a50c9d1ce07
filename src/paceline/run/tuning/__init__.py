"""Tuning: measurements that choose a plan, by trials, and the calibration of this machine.

Read `auto.py` first, then `trial.py` (the ranks' part), then `calibrate.py`.
"""
