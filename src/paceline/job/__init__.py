"""What to train: the job, its parts, and how each is built."""
