"""Networks by the name that a person types.

Imports no torch, so that a shell completes names at once; what builds a network does.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dmcp.errors import DmcpError
from dmcp.installation import install_command

if TYPE_CHECKING:
    from torch import nn

_FETCHING = ("weights", "pretrained", "checkpoint")  # how arguments begin that make a library fetch or read weights
_EXTRAS = {"timm": "timm", "ultralytics": "ultralytics"}  # that install libraries which networks come from
_CURRENT_FOLDER = ""  # on sys.path
_REGISTERED = re.compile(  # in the source of a library: @register_model, other decorators, def NAME
    r"""^@register_model(?:\((?:name=)?(?:"(?P<alias>[^"]+)")?\))?\n  # torchvision may give another name
    (?:@.*\n(?:[ )].*\n)*)*  # decorators, perhaps of several lines
    def[ ](?P<function>\w+)\(""",
    re.MULTILINE | re.VERBOSE,
)

# networks for small images


def _resnet(**kwargs: Any) -> nn.Module:
    """Build a residual network for small images."""
    from dmcp.networks import ResNet

    return ResNet(**kwargs)


def mobilenet_v2(num_classes: int = 10, **kwargs: Any) -> nn.Module:
    """torchvision's MobileNetV2 with two strides less, so that 32x32 images end at 4x4."""
    from torch import nn

    torchvision = library("torchvision")
    stages = [  # expansion, channels, repeats, stride; torchvision's second stage has stride 2
        [1, 16, 1, 1],
        [6, 24, 2, 1],
        [6, 32, 3, 2],
        [6, 64, 4, 2],
        [6, 96, 3, 1],
        [6, 160, 3, 2],
        [6, 320, 1, 1],
    ]
    settings = {"inverted_residual_setting": stages, "dropout": 0.0} | kwargs
    model: nn.Module = torchvision.models.MobileNetV2(num_classes=num_classes, **settings)
    stem = model.get_submodule("features.0.0")
    assert isinstance(stem, nn.Conv2d)
    stem.stride = (1, 1)
    model.sample_shape = (3, 32, 32)  # type: ignore[assignment]
    return model


NETS: Mapping[str, Mapping[str, Callable[..., nn.Module]]] = {
    "cifar": {
        "resnet20": partial(_resnet, blocks=3),
        "resnet32": partial(_resnet, blocks=5),
        "resnet56": partial(_resnet, blocks=9),
        "resnet110": partial(_resnet, blocks=18),
        "mobilenet_v2": mobilenet_v2,
    },
    "digits": {"resnet": partial(_resnet, blocks=1, sample_shape=(1, 8, 8))},
}


# building by name


def build(name: str, /, **kwargs: Any) -> nn.Module:
    """Build a network with fresh weights; nothing is downloaded.

    `resnet18` is torchvision's, `timm:mobilenetv3_large_100` is timm's, `cifar:resnet20` and `digits:resnet` are plain
    networks for small images, `package.module:factory` is your own function or class. The keyword arguments go to its
    builder.
    """
    from torch import nn

    factory = find(name)
    try:
        with warnings.catch_warnings():  # GoogLeNet and Inception announce a change of their own initialization
            warnings.simplefilter("ignore", FutureWarning)
            model = factory(**kwargs)
    except DmcpError:
        raise
    except (Exception, SystemExit) as error:
        raise DmcpError(f"{name}: its builder failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise DmcpError(f"{name}: its builder returned a {type(model).__name__}, not an nn.Module.")
    return model


def rebuild(name: str, typed: Iterable[str], classes: int | None, seed: int = 0) -> nn.Module:
    """Build the network of a run, with weights that depend on the seed only.

    typed: the words of --model-args. classes: those of the data, for networks that take a number of classes.
    """
    import torch

    arguments = dict(argument(word) for word in typed)
    if classes is not None and (of_library(name) or _takes_classes(find(name))):
        arguments = {"num_classes": classes} | arguments
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(name, **arguments)


def argument(text: str) -> tuple[str, Any]:
    """Read one name=value of --model-args: a number, bool, None, tuple or list if written as one, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise DmcpError(f"--model-args: {text!r} is not of the form name=value, like width_mult=1.5.")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    with contextlib.suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    return name, value


def of_library(name: str) -> bool:
    """Return True if torchvision, timm or this package builds the network, not a user's own code."""
    package, colon, _ = name.partition(":")
    return not colon or package in ("timm", *NETS)


def is_harmless(name: str, typed: Iterable[str]) -> bool:
    """Return True if building this network runs the code of libraries only, and fetches nothing from the network."""
    for word in typed:
        key, value = argument(word)
        if key.startswith(_FETCHING) and value:
            return False
    return of_library(name)


def _takes_classes(factory: Callable[..., Any]) -> bool:
    """Return True if a user's factory has an argument `num_classes`."""
    try:
        return "num_classes" in inspect.signature(factory).parameters
    except ValueError:  # functions that are written in C need not have a signature
        return False


def sample_shape(model: nn.Module, default: tuple[int, ...] = (3, 224, 224)) -> tuple[int, ...]:
    """Return the shape of one image for the model: its `sample_shape`, timm's input_size, else the default."""
    own_shape = getattr(model, "sample_shape", None)
    if own_shape:
        return tuple(own_shape)
    config = getattr(model, "pretrained_cfg", None) or {}
    return tuple(config.get("input_size", default))


def names(timm: bool = False) -> list[str]:
    """List the names that `build` knows: torchvision's and those of small networks, or timm's."""
    if timm:
        return [f"timm:{name}" for name in _registered_in("timm")]
    small = [f"{package}:{name}" for package, networks in NETS.items() for name in networks]
    return [*small, *_registered_in("torchvision")]


def _registered_in(library_name: str) -> list[str]:
    """List the models of torchvision or timm by reading its source: importing it would take seconds."""
    spec = importlib.util.find_spec(library_name)
    if spec is None or spec.origin is None:
        return []
    models = set()
    for path in Path(spec.origin).with_name("models").rglob("*.py"):
        for match in _REGISTERED.finditer(path.read_text(encoding="utf-8")):
            models.add(match["alias"] or match["function"])
    return sorted(models)


def find(name: str) -> Callable[..., Any]:
    """Return the function or class that builds the network of this name."""
    package, colon, rest = name.partition(":")
    if not colon:
        return _find_in_torchvision(name)
    if package.endswith(".py"):
        module = package.removesuffix(".py").strip("./").replace("/", ".")
        raise DmcpError(f"{name} names a file: write the name of its module, {module}:{rest}.")
    if package == "timm":
        return _find_in_timm(rest)
    if package in NETS:
        networks = NETS[package]
        if rest not in networks:
            _unknown(rest, networks, package, f"All: {', '.join(networks)}.")
        return networks[rest]

    factory = imported(package, rest)
    if not callable(factory):
        raise DmcpError(f"{name} is a {type(factory).__name__}, not a function or class that builds a network.")
    return factory  # type: ignore[no-any-return]


def _find_in_torchvision(name: str) -> Callable[..., Any]:
    torchvision = library("torchvision")
    models = torchvision.models.list_models()
    if name not in models:
        hint = "Other ways: timm:NAME, package.module:factory. For small images: cifar:NAME, digits:resnet."
        _unknown(name, models, "torchvision", hint)
    builder = torchvision.models.get_model_builder(name)
    parameters = inspect.signature(builder).parameters
    # Without weights_backbone=None a backbone would be downloaded.
    without_weights = {key: None for key in ("weights", "weights_backbone") if key in parameters}
    return lambda **kwargs: builder(**without_weights | kwargs)


def _find_in_timm(name: str) -> Callable[..., Any]:
    timm = library("timm")
    if not timm.is_model(name):
        _unknown(name, timm.list_models(), "timm")
    return lambda **kwargs: timm.create_model(name, **kwargs)


# importing


def library(name: str) -> Any:
    """Import a library that data names; neither it nor what it imports is looked for in the current folder."""
    before = list(sys.path)
    sys.path[:] = [folder for folder in before if folder != _CURRENT_FOLDER]
    try:
        return _import(name)
    finally:
        sys.path[:] = before


def imported(module: str, name: str) -> Any:
    """Return what a module that a person typed has under a name, like `build` or `Outer.build`.

    Only if the module is not installed does Python look into the current folder, also for what the module imports.
    """
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # an empty name, or a module that was not imported from a file; `_import` reports both
        spec = None
    is_installed = spec is not None and spec.origin is not None  # folders without __init__.py have no origin
    if not is_installed and _CURRENT_FOLDER not in sys.path:
        sys.path.append(_CURRENT_FOLDER)  # last, so that a file there does not take the place of a library
    value = _import(module)
    for part in name.split("."):
        if not hasattr(value, part):
            _unknown(part, dir(value), module)
        value = getattr(value, part)
    return value


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module and module in _EXTRAS:
            raise DmcpError(f"{module} is not installed: {install_command(_EXTRAS[module])}.") from error
        raise DmcpError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    except (Exception, SystemExit) as error:  # a script may leave by sys.exit
        raise DmcpError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def _unknown(name: str, existing: Iterable[str], where: str, hint: str = "") -> NoReturn:
    """Raise the error for a name that does not exist, with the nearest ones."""
    existing = list(existing)
    near = difflib.get_close_matches(name, existing, n=3, cutoff=0.5)
    if not near and name:
        near = [key for key in existing if name in key][:3]
    guess = ""
    if near:
        guess = f"Did you mean {', '.join(near)}?"
    raise DmcpError(" ".join(filter(None, [f"{where} has no {name!r}.", guess, hint])))
