"""Federated rules, one file each: the server's step, and the corrections of clients' gradients.

Read `fedprox.py` first. All have the methods of `paceline_federated.rule.FederatedRule`.
"""
