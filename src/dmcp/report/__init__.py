"""Figures, the HTML page and trackers."""
