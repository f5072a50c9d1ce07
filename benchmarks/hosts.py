"""Speed of what several hosts need; `hosts_speed.py` says what is measured, and how.

python benchmarks/hosts.py [--json]
"""

from hosts_speed import main

if __name__ == "__main__":
    main()
