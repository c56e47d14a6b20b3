"""Train and test networks: the loop, losses, calibration, and what is tried before the first step."""
