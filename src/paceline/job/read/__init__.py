"""Readers of job files: YAML with line numbers, import paths, and helpful error messages.

Read `yaml_file.py` first, then `messages.py`.
"""
