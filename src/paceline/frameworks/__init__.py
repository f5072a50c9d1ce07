"""Transports, codecs and sync rules of paceline for the training loops of other frameworks.

Start with `pytorch.py`. Each framework has one file, and no other file imports the framework.
"""
