"""Models that a job can name: built in, and those of Hugging Face configurations."""
