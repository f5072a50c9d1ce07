"""A rank's state: what is in it, and the three places for it: own memory, a peer's memory and disk.

Read `rank_state.py` first, then `checkpoint.py`, and `writer.py` and `reader.py` for the files of a checkpoint. This
room imports neither the engine nor the training loop.
"""
