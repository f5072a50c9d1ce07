"""Hosts emulated on this machine: network namespaces, links with limits, cgroups, and their removal.

Read `hosts.py` first, then `network.py` and `keeper.py`.
"""
