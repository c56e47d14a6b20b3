"""What every model of the zoo must show, as one function from an entry to a result.

The reference is the original network with hard gates. It is compared with the cut network, whose channels are gone;
costs are compared with torch's flop counter, with the parameters that are really there and with the bytes of the
tensors that ops really take and give, memory with a trace of the cut network.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from zoo.models import Entry

TOLERANCE = 1e-6  # of the difference between two images, in float64
MIN_EFFECT = 0.1  # gates that change the output by less make the comparison empty
TRAINED_PARAMS = 60_000_000  # larger models are not run in train mode
LARGE_PARAMS = 100_000_000  # larger models are run with two images instead of three


class Shortfall(Enum):
    """Why there is less to prune than the tracing study found, in the words of the page."""

    NORMS = "LayerNorm or GroupNorm mixes the channels of a space: unprunable, unless `exact=False`"
    STANDARDIZATION = "Weights are standardized over the channels of a space: unprunable"
    TOTAL = (
        "As many spaces as the tracing study found, or more; the total that the share is taken of is the flop counter's"
    )
    OTHER = "Other reasons"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was found out about one model; plain data, one JSON line."""

    name: str
    status: (
        str  # correct, wrong (cut without complaint, but unequal), vacuous (nothing was compared), failed (an error)
    )
    detail: str = ""  # why it is not correct
    seconds: float | None = None  # of dmcp.trace: both recordings, analysis and replay
    cpu_seconds: float | None = None  # of the same; on a machine that does nothing else they are equal
    spaces: int = 0
    share: float = 0.0  # of the full MACs in ops that read or write a prunable space
    loose_spaces: int = 0  # with exact=False; traced only where the share falls short of the table's
    loose_share: float | None = None
    unprunable: dict[str, int] = field(default_factory=dict)  # reason -> how many dims are unprunable for it
    bindings: list[str] = field(default_factory=list)  # module.attribute
    unknown: dict[str, int] = field(default_factory=dict)  # ops without a rule
    notes: list[str] = field(default_factory=list)
    error: float | None = None  # cut against gated, in differences between two images
    effect: float | None = None  # gated against full, in the same unit
    macs: tuple[int, int] = (0, 0)  # at full and at the sampled widths
    params: tuple[int, int] = (0, 0)
    train: str = ""  # ok, not tried, or why the cut network does not run in train mode

    def shortfall(self, entry: Entry) -> Shortfall | None:
        """Why more than a point of the prunable share that the tracing study found is missing, if it is."""
        least = (entry.share - 1) / 100
        if self.seconds is None or self.share >= least:
            return None
        if self.loose_share is not None and self.loose_share >= least:
            return Shortfall.NORMS
        if any("standardization" in reason for reason in self.unprunable):
            return Shortfall.STANDARDIZATION
        return Shortfall.TOTAL if max(self.spaces, self.loose_spaces) >= entry.spaces else Shortfall.OTHER

    @staticmethod
    def from_json(data: dict[str, Any]) -> Result:
        """Read what `dataclasses.asdict` and JSON made of a result."""
        return Result(**{**data, "macs": tuple(data["macs"]), "params": tuple(data["params"])})


def check(entry: Entry) -> Result:
    """Run one model through the whole contract; an error becomes a result too."""
    result = Result(name=entry.name, status="failed")
    try:
        for step in _steps(entry):
            result = dataclasses.replace(result, **step)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename.rpartition('/')[2]}:{at.lineno}"
        return dataclasses.replace(result, detail=f"{type(error).__name__} at {where}: {error}"[:2000])
    return dataclasses.replace(result, **_verdict(result))


def _steps(entry: Entry) -> Iterator[dict[str, Any]]:
    """Yield the fields of a result as they become known. At most three copies of the weights live at a time."""
    generator = Generator().manual_seed(zlib.crc32(entry.name.encode()))
    shape = (2 if entry.params > LARGE_PARAMS else 3, 3, entry.px, entry.px)
    images = torch.randn(shape, dtype=torch.float64, generator=generator)
    model = scramble(entry.build().eval().double(), images, generator)

    start, cpu_start = time.perf_counter(), time.process_time()
    graph = dmcp.trace(model, images)
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    described = {**seconds, **_description(graph)}
    yield described
    if Result(name=entry.name, status="", **described).shortfall(entry) is not None:
        loose = dmcp.trace(model, images, exact=False)
        yield {"loose_spaces": len(loose.spaces), "loose_share": float(loose.prunable_share)}
    widths = graph.widths(sample_widths([space.size for space in graph.spaces], generator))
    macs, params = (graph.macs(graph.full), graph.macs(widths)), (graph.params(graph.full), graph.params(widths))
    yield {"macs": macs, "params": params}

    with torch.no_grad():
        full = outputs(model(images))
        net = dmcp.Supernet(model, graph)
        del model  # the supernet has its own copy, and some of these models fill a quarter of the memory
        reference = outputs(net(images, net.hard(widths)))
        small = dmcp.cut(net.model, graph, widths)
        result = outputs(small(images))
    yield {"error": worst_error(result, reference), "effect": min_effect(full, reference)}

    counted = (counted_macs(net.model, images[:1]), counted_macs(small, images[:1]))
    there = (counted_params(net.model), counted_params(small))
    claims: dict[str, tuple[Any, Any]] = {"macs": (macs, counted), "params": (params, there)}
    claims["memory"] = (graph.memory(widths), dmcp.trace(small, images, verify=False).memory())
    traffic = (graph.traffic(graph.full), graph.traffic(widths))
    claims["traffic"] = (traffic, (counted_traffic(net.model, images[:1]), counted_traffic(small, images[:1])))
    yield {
        "detail": "; ".join(f"{name} {said} are really {real}" for name, (said, real) in claims.items() if said != real)
    }
    yield {"train": run_in_train_mode(small, net.model, images) if entry.params <= TRAINED_PARAMS else "not tried"}


def _description(graph: dmcp.ChannelGraph) -> dict[str, Any]:
    """What the trace says about the model, as plain data."""
    return {
        "spaces": len(graph.spaces),
        "share": float(graph.prunable_share),
        "unprunable": dict(Counter(item.reason for item in graph.unprunable).most_common()),
        "bindings": [f"{binding.module}.{binding.attribute}" for binding in graph.bindings],
        "unknown": {str(op): count for op, count in graph.unknown.items()},
        "notes": list(graph.notes),
    }


def _verdict(result: Result) -> dict[str, Any]:
    """Correct, or why not."""
    assert result.error is not None and result.effect is not None
    if not result.error < TOLERANCE:
        return {"status": "wrong", "detail": f"the cut network differs by {result.error:.1e}. {result.detail}".strip()}
    if result.detail:  # a cost that is not what was counted
        return {"status": "wrong"}
    if result.train not in ("ok", "not tried") and not result.train.startswith("as the original"):
        return {"status": "failed", "detail": f"in train mode: {result.train}"}
    if not result.effect >= MIN_EFFECT:
        return {"status": "vacuous", "detail": f"the gates change the output by {result.effect:.1e} only"}
    return {"status": "correct"}


@torch.no_grad()
def scramble(model: nn.Module, images: Tensor, generator: Generator) -> nn.Module:
    """Fill parameters and BatchNorm statistics, in place, with numbers that hide nothing: no zeros, no tiny scales."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _fill(name, parameter, generator)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:  # statistics near the true ones, so that activations neither explode nor saturate the gates of the model
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
        mean, var = norm.running_mean, norm.running_var
        assert mean is not None and var is not None
        var.add_(0.1 * var.mean() + 1e-3).mul_(torch.empty_like(var).uniform_(0.5, 1.5, generator=generator))
        mean.add_(torch.empty_like(mean).normal_(generator=generator) * var.sqrt() * 0.2)
    return model.train().eval()  # drops what a model keeps between calls in eval mode, such as attention biases


def _fill(name: str, parameter: nn.Parameter, generator: Generator) -> None:
    if "weight" in name and parameter.dim() >= 2:  # conv, linear, attention, lstm
        parameter.normal_(generator=generator).mul_((parameter[0].numel() / 2) ** -0.5)
    elif "bias" in name and parameter.dim() == 1:
        parameter.normal_(generator=generator).mul_(0.2)
    else:  # scales of norms and layers; tokens, positions and tables with both signs
        parameter.uniform_(0.5, 1.5, generator=generator)
        if parameter.dim() >= 2:
            parameter.mul_(torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1)


def sample_widths(sizes: list[int], generator: Generator) -> list[int]:
    """A random width per space, from half of its size to all but one channel (a single channel stays)."""
    lows = [max(1, (size + 1) // 2) for size in sizes]
    return [
        int(torch.randint(low, max(low + 1, size), (), generator=generator))
        for size, low in zip(sizes, lows, strict=True)
    ]


def outputs(output: Any) -> list[Tensor]:
    """The tensors of a nested output, a row per image."""
    return [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def worst_error(result: list[Tensor], reference: list[Tensor]) -> float:
    """Largest difference of any output, in differences between the first two images; infinite if shapes differ."""
    if [tensor.shape for tensor in result] != [tensor.shape for tensor in reference]:
        return float("inf")
    return max((_relative(a, b) for a, b in zip(result, reference, strict=True)), default=float("inf"))


def min_effect(full: list[Tensor], reference: list[Tensor]) -> float:
    """How far the gates move the output that they move least, in the same unit."""
    effects = [_relative(a, b) for a, b in zip(full, reference, strict=True)]
    return min((effect for effect in effects if effect < float("inf")), default=0.0)


def _relative(a: Tensor, reference: Tensor) -> float:
    unit = (reference[0] - reference[1]).abs().max()
    ratio = float((a - reference).abs().max() / unit)
    return ratio if ratio < float("inf") else float("inf")  # NaN, or an output that no image changes, compares nothing


def run_in_train_mode(small: nn.Module, original: nn.Module, images: Tensor) -> str:
    """Whether the cut network computes finite outputs in train mode, or fails only as the original does."""
    trial = copy.deepcopy(small).train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            finite = all(bool(tensor.isfinite().all()) for tensor in outputs(trial(images)))
        return "ok" if finite else "not finite"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:300]
        try:
            with torch.no_grad():
                copy.deepcopy(original).train()(images)
        except Exception as same:
            return f"as the original: {type(same).__name__}: {same}"[:300]
        return text


def counted_params(model: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def counted_macs(model: nn.Module, image: Tensor) -> int:
    """Multiply-adds by torch's own counter, on real tensors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer hides its products from the counter
    try:
        for parameter in trained:  # the counter fails where one is handed from module to module without gradients
            parameter.requires_grad_(False)
        plain = sdpa_kernel(SDPBackend.MATH)  # the counter of torch 2.11 does not know the fused one of CPUs
        with torch.no_grad(), plain, FlopCounterMode(display=False) as counter:
            model(image)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for parameter in trained:
            parameter.requires_grad_(True)
    return int(counter.get_total_flops()) // 2


# Ops that give back the same numbers: free, though some of them may copy.
_SAME_NUMBERS = {"reshape", "flatten", "contiguous", "clone", "dropout_", "feature_dropout_", "alpha_dropout_"}


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up the bytes of the real tensors that ops take and give, each tensor of an op once; views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(leaf): leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        taken = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        given = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

        storages = {leaf.untyped_storage().data_ptr() for leaf in taken.values()}
        shows_only = bool(given) and all(leaf.untyped_storage().data_ptr() in storages for leaf in given)
        reshapes_in_place = any(leaf.shape != before[id(leaf)] for leaf in taken.values())  # squeeze_
        is_view = shows_only and (reshapes_in_place or not func._schema.is_mutable)
        if not is_view and func._schema.name.removeprefix("aten::") not in _SAME_NUMBERS:
            self.total_bytes += sum(leaf.numel() * leaf.itemsize for leaf in [*taken.values(), *given])
        return result


def counted_traffic(model: nn.Module, image: Tensor) -> int:
    """Bytes that all ops of one pass in eval mode take and give, on real tensors; ops as autograd sees them."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one op would stand for a whole encoder layer
    trial = copy.deepcopy(model).train().eval()  # what it keeps between calls of eval mode would be computed by no op
    try:
        with torch.inference_mode(), TrafficCounter() as counter:
            trial(image)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.total_bytes
