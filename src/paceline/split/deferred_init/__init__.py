"""Models built without memory: each rank then makes the values of its own parts only, with the same bits.

Read `deferred.py` first, then `recorder.py` and `tape.py`.
"""
