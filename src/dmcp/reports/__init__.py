"""What run folders hold, for people: lists, charts, one HTML page, curves for other tools."""
