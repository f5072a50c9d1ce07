"""Files in object stores: `store.py` reads URLs and moves objects, `data.py` keeps copies.

Everything goes through fsspec, which is imported when the first URL is used.
"""
