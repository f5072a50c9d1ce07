"""Transports, codecs and rules of paceline in other frameworks' loops; one file each.

Start with `pytorch.py`. Only the file of a framework imports it.
"""
