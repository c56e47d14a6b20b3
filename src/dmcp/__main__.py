"""`python -m dmcp` is the command `dmcp`."""

from dmcp.cli.main import main

main()
