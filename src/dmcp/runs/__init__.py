"""A run is a folder: files are written whole or not at all, only logs grow, and reading trusts nothing."""
