"""Files of a data set: which files hold rows, and how a row is read.

Read `rows.py` first, then `shards.py`. Modules here import neither torch nor the rest of the core above `storage/`.
"""
