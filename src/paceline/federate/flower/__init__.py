"""A federated job on Flower: its clients as a ClientApp, its rule as a Flower strategy, both as an app.

Read `client.py` first, then `strategy.py`. Both import Flower (`flwr`); `export.py`, which writes the app, does not.
"""
