"""Transports, codecs and rules of paceline in loops of other frameworks; one file each.

Start with `pytorch.py`. A framework is imported by its file alone.
"""
