"""The search for widths."""
