"""State of a rank, its copies in memory, and its checkpoints on disk.

Read `rank_state.py` first, then `checkpoint.py`. `writer.py` and `reader.py` handle the files of a checkpoint. This
package imports neither the engine nor the training loop.
"""
