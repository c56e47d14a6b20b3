"""What holds for the repository as a whole."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import importlinter.cli
import pytest

import dmcp
from dmcp.errors import DmcpError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dmcp"


def test_imports_point_one_way() -> None:
    """The order of the rooms is in pyproject.toml, and import-linter holds it."""
    assert (
        importlinter.cli.lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
        == importlinter.cli.EXIT_STATUS_SUCCESS
    )


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == dmcp.__version__
    assert f"\nversion: {dmcp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {dmcp.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_every_file_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {PACKAGE.parent / name.replace(".", "/"): files for name, files in data.items()}
    packed = {path for folder, files in folders.items() for file in files for path in folder.glob(file)}
    assert {path for path in committed() if path.is_relative_to(PACKAGE) and path.suffix != ".py"} == packed


def test_the_wheel_describes_itself_without_links_into_a_clone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    for address in ("", "git://example/torch-dmcp"):
        folder = tmp_path / (address and "with")
        (folder / "src" / "dmcp").mkdir(parents=True)
        (folder / "src" / "dmcp" / "__init__.py").touch()
        for name in ("README.md", "LICENSE", "setup.py"):
            shutil.copy(ROOT / name, folder)
        line = f'Repository = "{address}"' if address else ""
        project = re.sub(r"^(# )?Repository = .*$", line, (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
        (folder / "pyproject.toml").write_text(project)
        code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make('.')"
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
        description = next(folder.glob("*.dist-info/METADATA")).read_text().partition("\n\n")[2]

        assert "## In Python" in description
        assert not re.search(r"PACKAGE|make demo|pip install -e", description)  # what only works in a clone
        targets = re.findall(r'\]\(([^)]*)\)|(?:src|srcset)="([^"]*)"', description)
        assert [target for pair in targets for target in pair if target and not target.startswith(address or "#")] == []
        assert ("<img" in description) is bool(address)


def test_commands_that_install_extras_work_in_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has the package: its name cannot be installed; pages and messages know its address, if it has one."""
    package = re.compile(r"pip install \W*torch-dmcp")
    pages = [path for path in committed() if path.suffix in (".md", ".ipynb")]
    sources = [path for path in committed() if path.is_relative_to(PACKAGE) and path.name != "installation.py"]
    assert [path.name for path in (*pages, *sources) if package.search(path.read_text(errors="replace"))] == []
    monkeypatch.setattr(sys, "argv", ["address.py", "--check"])
    runpy.run_path(str(ROOT / "tools" / "address.py"), run_name="__main__")  # raises SystemExit for a page

    for url, command in ((None, 'pip install -e ".[hub]"'), ("Repository, git://example", "git+git://example")):
        known = Message()
        if url:
            known["Project-URL"] = url
        monkeypatch.setattr("dmcp.installation.metadata", lambda _, known=known: known)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "huggingface_hub", None)
            with pytest.raises(DmcpError, match=re.escape(command)):
                dmcp.load("user/name")


def committed() -> Iterator[Path]:
    """Text files of the tree, less what .gitignore names."""
    lines = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#")]
    ignored = {line.strip("/") for line in lines if not line.startswith("/")} | {".git"}
    tops = ignored | {line.strip("/") for line in lines}
    for top in sorted(ROOT.iterdir()):
        for path in [top] if top.is_file() else sorted(top.rglob("*")) if top.name not in tops else []:
            if path.is_file() and not set(path.parts) & ignored and path.suffix not in (".png", ".pyc"):
                yield path


def test_no_file_names_a_registry_host() -> None:
    hosts = re.compile(r"(py[p]i|python[h]osted|ana[c]onda|npm[j]s|hugging[f]ace)\.(org|com|co)\b|download\.py[t]orch")
    assert [path.name for path in committed() if hosts.search(path.read_text(errors="replace"))] == []


def test_the_command_line_does_not_wait_for_torchvision() -> None:
    """It takes as long to import as torch does, and dmcp --help, runs and cells on digits have no use for it."""
    for path in (ROOT / "src" / "dmcp").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [it.name for it in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("torchvision", "timm")], path
