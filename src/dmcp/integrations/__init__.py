"""Other libraries, each imported only by the file of its name."""
