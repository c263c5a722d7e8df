"""Complete training programs, one file each, to be read from top to bottom and copied."""
