"""import dmcp: public names are loaded when they are used."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import dmcp

CODE = """
import sys
import dmcp
assert "torch" not in sys.modules
dmcp.SearchConfig, dmcp.BudgetError, dmcp.settings
assert "torch" not in sys.modules
import dmcp.searching.search, dmcp.tracing.trace, dmcp.training.loop
from dmcp import *
assert all(callable(it) for it in (search, trace, train, dmcp.search, dmcp.trace, dmcp.train))
assert dmcp.training.losses.top1 and not hasattr(dmcp, "nonsense")
"""


def test_names_are_loaded_late_and_torch_with_them() -> None:
    path = str(Path(dmcp.__file__).parents[1])
    end = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert (end.returncode, end.stderr) == (0, "")


def test_the_names_for_type_checkers_are_those_that_are_there() -> None:
    """And no module of the package has the name of one: importing it would replace the name."""
    imports = [it for it in ast.walk(ast.parse(Path(dmcp.__file__).read_text())) if isinstance(it, ast.ImportFrom)]
    names = [it.asname or it.name for one in imports if str(one.module).startswith("dmcp") for it in one.names]
    assert sorted([*names, "__version__"]) == sorted(dmcp.__all__) and set(dmcp.__all__) <= set(dir(dmcp))
    assert all(getattr(dmcp, name) is not None for name in dmcp.__all__)
    assert not {module.name for module in pkgutil.iter_modules(dmcp.__path__)} & set(dmcp.__all__)
