"""Files in object stores: `url.py` reads URLs, `store.py` moves objects, `data.py` keeps copies.

Everything goes through fsspec, which is imported when the first URL is used.
"""
