"""What `trace` is made of: one forward pass as a list of ops, and which channels in it are the same."""
