"""What `paceline doctor` looks at: this machine's devices, software, links and power.

Read `checks.py` first.
"""
