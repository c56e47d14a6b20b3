"""A command at work: settings, model and data by name, ranks, signals, progress, several at once."""
