"""A federated job on Flower.

Its clients are a ClientApp, its rule is a Flower strategy, and both make an app. Read `client.py` first, then
`strategy.py`. Both import Flower (`flwr`); `export.py`, which writes the app, does not.
"""
