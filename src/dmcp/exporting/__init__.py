"""Export networks, and measure how long they take."""
