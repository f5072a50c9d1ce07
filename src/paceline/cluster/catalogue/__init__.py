"""Named hardware: what accelerators can do by their makers' data sheets.

Read `devices.py` first.
"""
