"""Reading job files: YAML with line numbers, import paths, and errors that name the nearest known word.

Read `yaml_file.py` first, then `messages.py`.
"""
