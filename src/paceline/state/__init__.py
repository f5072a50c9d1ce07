"""State of a rank: copies in memory, of its own or a peer, and checkpoints on disk.

Read `rank_state.py` first, then `checkpoint.py`. `writer.py` and `reader.py` handle the files of a checkpoint. This
package imports neither the engine nor the training loop.
"""
