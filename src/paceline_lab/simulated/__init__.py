"""Scaling of a job on machines that nobody here has, predicted and simulated (`paceline bench --simulate`).

Read `curve.py` first: the points and how they are made. Then `chance.py`: what is drawn at random.
"""
