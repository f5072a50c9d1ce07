"""Files that `paceline init` copies: starter jobs, and the Python files that they name.

The copied Python files belong to the user, so they do not import paceline.
"""
