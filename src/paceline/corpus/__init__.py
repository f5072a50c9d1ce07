"""Files of a data set: listing, local copies, row access, sample order and tokens.

Read `rows.py` first, then `shards.py`. Modules here import neither torch nor the rest of the core above `storage/`.
"""
