"""The command `paceline serve`."""
