"""The job: what to train, its parts, and how each is built."""
