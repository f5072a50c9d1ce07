"""`python -m paceline` is the same as the command `paceline` (and what `torchrun -m paceline` starts)."""

from paceline.cli import main

main()
