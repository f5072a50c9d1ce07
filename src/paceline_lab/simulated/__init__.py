"""Predicted and simulated scaling of a job on other machines (`paceline bench --simulate`).

Read `curve.py` first: the points of a curve. Then `chance.py`: failures and stragglers drawn at random.
"""
