"""Checkpoints: written beside training, read on any plan, exported to one file.

Read `writer.py` first, then `manifest.py` (what is in a checkpoint) and `reader.py`.
"""
