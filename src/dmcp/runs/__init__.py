"""Folders of runs: what is saved, written and read."""
