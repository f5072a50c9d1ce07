"""Federated training: clients keep their data, and a server aggregates their updates (`paceline federate`).

Read `rules.py` first, then `client.py`, `server.py` and `simulation.py`.
"""
