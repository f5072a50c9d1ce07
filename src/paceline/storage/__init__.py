"""Files in object stores: `url.py` reads URLs, `store.py` moves objects and keeps copies.

Everything goes through fsspec, which is imported when the first URL is used.
"""
