"""Federated training: clients keep their data, and a server aggregates their updates (`paceline federate`).

Read `rule.py` first, then `rules/fedprox.py`, `client.py`, and `simulation/run.py`.
"""
