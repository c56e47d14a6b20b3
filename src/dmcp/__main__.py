"""`python -m dmcp` is the command `dmcp`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]  # a stranger's folder must not take the place of libraries that are imported later

from dmcp.cli.main import main

main()
