"""A rank's state in its own memory, in a peer's memory, and on disk.

Read `rank_state.py` first, then `checkpoint.py`, and `writer.py` and `reader.py` for the files of a checkpoint. This
package imports neither the engine nor the training loop.
"""
