"""Builds wheel and source archive, and tries the wheel as a new user would: in an empty environment, outside any clone.

python tools/release.py           as `make release` does; it does everything but the upload
python tools/release.py --quick   torch and the other packages are those of this environment, which saves minutes
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ("front.ipynb", "segmentation.ipynb")  # the other one needs Ultralytics: make integrations runs it
SHIPPED = "checkpoints/cifar-resnet20-50"  # in the source archive
LOAD = f"""
import dmcp, torch
network = dmcp.load({SHIPPED!r}).eval()
print(network(torch.zeros(1, 3, 32, 32)).shape, sum(parameter.numel() for parameter in network.parameters()))
"""


def main() -> None:
    """Build, check, install and try."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
    (wheel,) = dist.glob("*.whl")
    (archive,) = dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, archive)
    with tempfile.TemporaryDirectory() as folder:
        python = install(wheel, Path(folder) / "venv", quick="--quick" in sys.argv)
        work = Path(folder) / "work"
        work.mkdir()
        try_wheel(python, archive, work)
    print(f"\n{wheel.name} and {archive.name} work.")
    print("What is left: the date in CHANGELOG.md, a tag, and twine upload dist/*")


def install(wheel: Path, folder: Path, quick: bool) -> Path:
    """Make an environment that has the wheel; its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    if quick:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel)
    else:
        run(python, "-m", "pip", "install", "-q", f"{wheel}[export,notebooks]")
    return python


def try_wheel(python: Path, archive: Path, work: Path) -> None:
    """Run what README and notebooks show in an empty folder, and load a network of the source archive."""
    dmcp = python.with_name("dmcp")
    run(dmcp, "--version", cwd=work)
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    run(python, "-c", block, cwd=work)
    run(dmcp, "demo", cwd=work)

    with tarfile.open(archive) as file:
        file.extractall(work, filter="data")
    (source,) = work.glob("torch_dmcp-*")
    shutil.copytree(source / SHIPPED, work / SHIPPED)
    run(python, "-c", LOAD, cwd=work)
    for name in NOTEBOOKS:
        shutil.copy(source / "examples" / name, work)
        run(python, source / "tools" / "notebooks.py", name, cwd=work)


def run(*words: object, cwd: Path = ROOT) -> None:
    """Print a command and run it; the program ends if it fails. Nothing on PYTHONPATH takes the wheel's place."""
    command = [str(word) for word in words]
    first_lines = " ".join(command).strip().splitlines()
    print(f"\n$ {first_lines[0]}{' ...' if len(first_lines) > 1 else ''}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if subprocess.run(command, cwd=cwd, env=environment).returncode:
        raise SystemExit(f"failed: {first_lines[0]}")


if __name__ == "__main__":
    main()
