"""How what is missing is installed, for messages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata


def project_address() -> str:
    """The address of the repository, which the metadata have from pyproject.toml; empty while there is none."""
    try:
        urls = metadata("torch-dmcp").get_all("Project-URL") or []
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
        return f'pip install "torch-dmcp[{extra}] @ git+{address}"'
    return f'pip install -e ".[{extra}]" in the clone of torch-dmcp'
