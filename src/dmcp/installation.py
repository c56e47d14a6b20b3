"""How what is missing is installed, for messages."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution, metadata

_NAME = "torch-dmcp"


def project_address() -> str:
    """The address of the repository, which the metadata have from pyproject.toml; empty while there is none."""
    try:
        urls = metadata(_NAME).get_all("Project-URL") or []
    except PackageNotFoundError:  # the source is only on sys.path
        return ""
    for url in urls:
        name, _, address = url.partition(", ")
        if name == "Repository":
            return str(address)
    return ""


def install_command(extra: str) -> str:
    """The command that installs an extra of this package, as the end of a sentence without its period."""
    address = project_address()
    if address:
        return f'pip install "{_NAME}[{extra}] @ git+{address}"'
    packages = _packages_of(extra)
    if _is_clone() or not packages:
        return f'pip install -e ".[{extra}]" in the clone of {_NAME}'
    return f"pip install {' '.join(packages)}"


def _is_clone() -> bool:
    """Whether the package runs from a clone, by pip install -e or on sys.path."""
    try:
        origin = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return True
    return bool(json.loads(origin or "{}").get("dir_info", {}).get("editable"))


def _packages_of(extra: str) -> list[str]:
    """The packages of an extra, quoted where a shell needs it; none if they are not known."""
    try:
        requirements = metadata(_NAME).get_all("Requires-Dist") or []
    except PackageNotFoundError:
        return []
    packages = []
    for requirement in requirements:
        package, _, condition = requirement.partition("; ")
        if condition == f'extra == "{extra}"':
            packages.append(f'"{package}"' if ">" in package or "<" in package else package)
    return packages
