"""Entry point of `python -m paceline` and `torchrun -m paceline`, the same as the command `paceline`."""

from paceline.cli import main

main()
