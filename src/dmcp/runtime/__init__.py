"""Files, processes and devices."""
