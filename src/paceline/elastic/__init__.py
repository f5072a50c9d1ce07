"""Starting a run: the ranks of this machine, started, watched and ended together."""
