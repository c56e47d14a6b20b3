"""What people type: one file for a few commands, thin, on the functions beneath."""
