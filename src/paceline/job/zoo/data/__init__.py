"""Data sets that a job can name, and the reading of images, arrays, text and files."""
