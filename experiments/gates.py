"""Gates of stage 2 that show the alphas what is cut: hard ones up to the expected width of each space.

The soft network has every channel, each by its marginal probability. Here the groups inside the expected width have a
gate of 1, those behind it of 0, and the one at the border has the part of it that is inside. This is the network that
expected sampling would cut, between two hard widths; its loss moves the alphas by the expected widths alone. Chains
stay as broad as they are, and so do the samples of stage 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from dmcp.markov import moment
from dmcp.searching.subnets import Chains


def up_to_expected(marginals: Tensor, sizes: Tensor) -> Tensor:
    """The part of each group that is inside the expected width. (S, G), (S, G) -> (S, G)"""
    expected = moment(marginals, sizes, 1)
    begins = sizes.cumsum(dim=1) - sizes
    return ((expected[:, None] - begins) / sizes.clamp(min=1)).clamp(0, 1) * (sizes > 0)


@contextlib.contextmanager
def hard_in_stage2() -> Iterator[None]:
    """While entered, searches show the alphas the network of their expected widths instead of the soft one."""
    original = Chains.gates

    def gates(self: Chains, groups: Tensor) -> Tensor:
        inside = up_to_expected(groups, self.sizes)
        return F.pad(inside, (0, 1)).flatten(-2)[..., self.index]

    Chains.gates = gates  # type: ignore[method-assign]
    try:
        yield
    finally:
        Chains.gates = original  # type: ignore[method-assign]
