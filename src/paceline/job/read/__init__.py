"""Names in a job: code by import path, and models by their dimensions."""
