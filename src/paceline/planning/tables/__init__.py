"""Tables of measured training runs of any framework, as layouts of the cost model.

Read `rows.py` first, then `layouts.py`; `cells.py` and `models.py` parse the text in such tables.
"""
