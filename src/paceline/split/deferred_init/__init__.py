"""Deferred initialisation: a model is built without memory, then each rank fills its own parts.

The values have the same bits as those of a plain construction. Read `initialise.py` first, then `recorder.py` and
`operation_log.py`.
"""
