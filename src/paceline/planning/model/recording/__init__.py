"""Recording of a forward pass: values, operations, module calls and Python calls as one graph.

Read `graph.py` first (the result), then `record.py` (its construction).
"""
