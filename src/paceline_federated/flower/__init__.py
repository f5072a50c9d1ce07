"""Deployments of a federated job on Flower.

The job's clients are a ClientApp and its rule is a Flower strategy; `deploy.py` writes both into an app and runs it.
Read `app.py` first, then `client.py` and `server.py`. All but `deploy.py` import Flower (`flwr`).
"""
