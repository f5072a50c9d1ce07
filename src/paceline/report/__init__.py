"""Pictures: pages that open offline, of a run or of a benchmark."""
