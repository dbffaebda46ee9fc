"""Apps to run and to read; what they do is real, what they sell is not."""
