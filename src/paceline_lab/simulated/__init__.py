"""Predicted and simulated scaling of a job on other machines (`paceline bench simulate`).

Read `curve.py` first: it computes the points of a curve. `measured_here.py` draws failures and stragglers at random.
"""
