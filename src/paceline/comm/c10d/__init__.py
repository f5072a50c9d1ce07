"""What the process groups of our own share: c10d's calls, the operations behind them, and how they are seen by PyTorch."""
