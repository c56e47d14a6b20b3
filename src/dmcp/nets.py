"""Networks by the name that a person types."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from dmcp import cifar_nets
from dmcp.errors import DmcpError


def build(name: str, /, **kwargs: Any) -> nn.Module:
    """Build a network with fresh weights; nothing is downloaded.

    `resnet18` is torchvision's, `timm:mobilenetv3_large_100` is timm's, `cifar:resnet20` and `digits:resnet` are plain
    networks for small images, `package.module:factory` is your own function or class. The keyword arguments go to its
    builder.
    """
    factory = find(name)
    try:
        with warnings.catch_warnings():  # GoogLeNet and Inception announce a change of their own initialisation
            warnings.simplefilter("ignore", FutureWarning)
            model = factory(**kwargs)
    except DmcpError:
        raise
    except (Exception, SystemExit) as error:
        raise DmcpError(f"{name}: its builder failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise DmcpError(f"{name}: gave a {type(model).__name__}, not an nn.Module.")
    return model


def sample_shape(model: nn.Module) -> tuple[int, ...]:
    """Shape of one image for the model: what it or timm says of it, else the usual 3x224x224."""
    own = getattr(model, "sample_shape", None)
    if own is not None:
        if not isinstance(own, tuple) or not all(type(size) is int and size > 0 for size in own):
            raise DmcpError(f"The model's sample_shape must be a tuple of sizes, like (3, 224, 224), not {own!r}.")
        return own
    config = getattr(model, "pretrained_cfg", None) or {}
    return tuple(config.get("input_size", (3, 224, 224)))


def names(timm: bool = False) -> list[str]:
    """Names that `build` knows: those of torchvision and the small networks, or those of timm, if it is installed."""
    if timm:
        return [f"timm:{name}" for name in _import_timm().list_models()]
    import torchvision  # late: see cifar_nets.mobilenet_v2

    small = [f"{library}:{name}" for library, known in cifar_nets.NETS.items() for name in known]
    return [*small, *torchvision.models.list_models()]


def find(name: str) -> Callable[..., Any]:
    """The function or class that builds the network of this name."""
    try:
        return _find(name)
    except DmcpError as error:
        raise DmcpError(_file_named(name) or str(error)) from error.__cause__


def _find(name: str) -> Callable[..., Any]:
    library, colon, rest = name.partition(":")
    if not colon:
        return _torchvision(name)
    if library in cifar_nets.NETS:
        known = cifar_nets.NETS[library]
        if rest not in known:
            raise DmcpError(_unknown(rest, known, library, f"All of them: {', '.join(known)}."))
        return known[rest]
    return _timm(rest) if library == "timm" else _own(library, rest)


def _torchvision(name: str) -> Callable[..., Any]:
    import torchvision  # late: see cifar_nets.mobilenet_v2

    known = torchvision.models.list_models()
    if name not in known:
        if own := _dotted(name):
            raise DmcpError(f"There is no {name!r} in torchvision; did you mean {own}?")
        raise DmcpError(
            _unknown(
                name,
                known,
                "torchvision",
                "Other ways: timm:NAME, package.module:factory. For small images: cifar:NAME, digits:resnet.",
            )
        )
    builder = torchvision.models.get_model_builder(name)
    arguments = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:  # else segmentation nets download a backbone
        arguments["weights_backbone"] = None
    return lambda **kwargs: builder(**arguments | kwargs)


def _import_timm() -> Any:
    try:
        import timm
    except ImportError:
        raise DmcpError("timm is not installed: pip install torch-dmcp[timm]") from None
    return timm


def _timm(name: str) -> Callable[..., Any]:
    timm = _import_timm()
    if not timm.is_model(name):
        raise DmcpError(_unknown(name, timm.list_models(), "timm"))
    return lambda **kwargs: timm.create_model(name, **{"pretrained": False} | kwargs)


def imported(module: str, name: str) -> Any:
    """What somebody's own module has under a name, like `build` or `Outer.build`."""
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a script that is no module may leave by sys.exit
        raise DmcpError(f"{module}:{name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise DmcpError(_unknown(part, dir(found), module))
        found = getattr(found, part)
    return found


def _own(module: str, factory: str) -> Callable[..., Any]:
    found = imported(module, factory)
    if not callable(found):
        raise DmcpError(f"{module}:{factory}: not a function or class that builds a network.")
    return found  # type: ignore[no-any-return]


def _file_named(name: str) -> str:
    """How the module is named, where a file was named; empty for any other name."""
    file, colon, factory = name.partition(":")
    path = Path(file)
    inside = [part for part in path.parts if part not in (".", "..", "/")]
    module = ".".join(inside).removesuffix(".py")
    if not inside or module == file:
        return ""
    far = ".." in path.parts or path.is_absolute()
    where = f" in the folder {str(path.parent)!r}" if far else ""
    module = inside[-1].removesuffix(".py") if far else module
    hint = "" if colon else ", with the function or class that builds it for NAME"
    return (
        f"{name}: a network of your own is named by its module, not by a file: write "
        f"{module}:{factory or 'NAME'}{where}{hint}."
    )


def _dotted(name: str) -> str:
    """The name with a colon, where the part before its last dot is a module; empty otherwise."""
    module, _, factory = name.rpartition(".")
    with contextlib.suppress(Exception):  # of somebody's package, or of a name that is none
        if module and factory and importlib.util.find_spec(module) is not None:
            return f"{module}:{factory}"
    return ""


def _unknown(name: str, known: Iterable[str], where: str, hint: str = "") -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [key for key in known if name and name in key][:3]
    guess = f"did you mean {', '.join(near)}?" if near else "and no name near it."
    return f"There is no {name!r} in {where}; {guess} {hint}".strip()
