"""Deployments of a federated job on Flower.

The job's clients are a ClientApp, and the job's rule is a Flower strategy. Read `app.py` first, which also writes and
runs the app, then `client.py` and `server.py`.
"""
