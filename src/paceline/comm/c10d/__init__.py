"""Common base of paceline's process groups: c10d's calls, operations behind them, and profiling."""
