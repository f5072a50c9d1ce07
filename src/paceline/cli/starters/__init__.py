"""Files that `paceline init` copies: starter jobs, and the Python files that they name.

The Python files are a user's own code from then on, so they import nothing of paceline.
"""
