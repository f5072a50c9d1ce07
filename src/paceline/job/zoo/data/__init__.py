"""Data sets that a job can name, and readers of images, arrays, text and files."""
