"""Commands that install an extra fit how the package was installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmcp.installation import install_command

METADATA = """Metadata-Version: 2.4
Name: torch-dmcp
Version: 9.9
Requires-Dist: torch>=2.11
Requires-Dist: onnx; extra == "export"
Requires-Dist: onnx-ir>=0.1.6; extra == "export"
Requires-Dist: timm; extra == "timm"
"""
CLONE = 'pip install -e ".[export]" in the clone of torch-dmcp'


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"dir_info": {"editable": True}}, CLONE),
        ({"archive_info": {}}, 'pip install onnx "onnx-ir>=0.1.6"'),  # of a wheel
        (None, 'pip install onnx "onnx-ir>=0.1.6"'),  # of an index
    ],
    ids=["clone", "wheel", "index"],
)
def test_what_installs_an_extra(origin: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch_dmcp-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    if origin:
        (folder / "direct_url.json").write_text(json.dumps(origin | {"url": "file:///somewhere"}))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("export") == command


def test_an_address_gives_all_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch_dmcp-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"{METADATA}Project-URL: Repository, git://example/torch-dmcp\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("timm") == 'pip install "torch-dmcp[timm] @ git+git://example/torch-dmcp"'
