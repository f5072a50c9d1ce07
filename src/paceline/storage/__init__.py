"""Files in object stores: `url.py` checks URLs, `store.py` transfers objects and caches copies.

All transfers use fsspec, which is imported with the first URL.
"""
