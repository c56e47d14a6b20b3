"""How `trace` finds which channels of a network belong together, and what they cost."""
