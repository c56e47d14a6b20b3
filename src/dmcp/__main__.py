"""`python -m dmcp` is the command `dmcp`."""

from dmcp.cli import main

main()
