"""Speed of remote calls; `remote_speed.py` says what is measured, and how.

python benchmarks/remote.py [--json] [--peers PYTHON]
"""

from remote_speed import main

if __name__ == "__main__":
    main()
