"""`python -m dmcp` is the command `dmcp`; the current folder is taken off sys.path in `dmcp/__init__.py`."""

from dmcp.cli.main import main

main()
