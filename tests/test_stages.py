"""weight_step and arch_step: what they change, what they leave alone bit for bit (I8), and the alphas' slope (I11)."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nets import Chain, Depthwise, Residual, randomise, sample
from test_gates import EXPLICIT, Backwards, Plain, by_width
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
import dmcp.searching.steps
from dmcp.budget import parse
from dmcp.errors import TrainingError
from dmcp.searching.steps import arch_step, weight_step
from dmcp.searching.subnets import chains, sandwich
from dmcp.settings import Sampling


@functools.cache
def traced(toy: Any) -> tuple[nn.Module, Any]:
    """A model that no test changes, and its graph."""
    model = randomise(toy(**toy.FULL))
    return model, dmcp.trace(model, sample(toy.SHAPE))


def made(toy: Any = Residual, groups: int = 4) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
    """A supernet in float64 with random alphas, its chains, and two batches."""
    x = sample(toy.SHAPE, batch=8)
    net = dmcp.Supernet(*traced(toy), groups).double().train()
    with torch.no_grad():
        net.alpha.copy_(torch.randn_like(net.alpha))
    labels = torch.arange(8) % 5
    return net, chains(net), [(x[:4], labels[:4]), (x[4:], labels[4:])]


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])  # in the precision of the output, unlike the default loss


def photograph(net: Any) -> dict[str, bytes]:
    """The bits of alphas, weights and buffers."""
    tensors = [("alpha", net.alpha), *net.model.named_parameters(), *net.model.named_buffers()]
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors}


def changed(net: Any, before: dict[str, bytes]) -> set[str]:
    return {name for name, bits in photograph(net).items() if bits != before[name]}


class Counted(torch.optim.SGD):
    """SGD that counts its steps."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(*args, **kwargs)


def sgd(parameters: Any, lr: float = 0.1) -> Counted:
    return Counted(parameters, lr=lr)


# -- I8: what a step leaves alone


def test_weight_step_leaves_the_alphas() -> None:
    net, path, batches = made()
    before = photograph(net)
    record = weight_step(net, batches[:1], sgd(net.weights()), sandwich(net, path, Sampling.MARKOV, 2), cross_entropy)
    after = changed(net, before)
    assert "alpha" not in after and net.alpha.grad is None
    assert after >= {name for name, _ in net.model.named_parameters()}
    assert record.losses.shape == (4,) and not record.losses.requires_grad


def test_arch_step_leaves_weights_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    net, path, batches = made()
    flags = [weight.requires_grad_(number % 3 > 0).requires_grad for number, weight in enumerate(net.weights())]
    budget = parse("50%", net.graph)
    before = photograph(net)
    record = arch_step(net, batches[:1], sgd(net.alphas()), path, cross_entropy, budget)
    assert changed(net, before) == {"alpha"}
    assert [weight.requires_grad for weight in net.weights()] == flags
    assert all(weight.grad is None for weight in net.weights())
    assert record.task_loss is not None and not record.task_loss.requires_grad and not record.ratios.requires_grad

    @contextlib.contextmanager
    def wrong(net: Any) -> Iterator[None]:  # as above, but running statistics are not put back
        for weight in net.weights():
            weight.requires_grad_(False)
        yield

    monkeypatch.setattr(dmcp.searching.steps, "_only_alphas", wrong)
    before = photograph(net)
    arch_step(net, batches[:1], sgd(net.alphas()), path, cross_entropy, budget)
    assert "bn0.running_mean" in changed(net, before)


def test_arch_step_that_fails_leaves_everything() -> None:
    net, path, batches = made()
    before = photograph(net)

    def fails(output: Tensor, batch: Any) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arch_step(net, batches, sgd(net.alphas()), path, fails, parse("50%", net.graph))
    assert not changed(net, before)
    assert all(weight.requires_grad for weight in net.weights())


# -- stage 1


def test_one_step_along_the_sum_of_all_slopes() -> None:
    net, path, batches = made()
    subnets = sandwich(net, path, Sampling.UNIFORM, 2, torch.Generator().manual_seed(0))
    slopes = [torch.zeros_like(weight) for weight in net.weights()]
    for gates in subnets:
        loss = cross_entropy(net(batches[0][0], gates), batches[0])
        for total, slope in zip(slopes, torch.autograd.grad(loss, net.weights()), strict=True):
            total += slope
    expected = [weight.detach() - 0.1 * slope for weight, slope in zip(net.weights(), slopes, strict=True)]
    wrong = copy.deepcopy(net)
    optimizer = sgd(net.weights())
    weight_step(net, batches[:1], optimizer, subnets, cross_entropy, distill=False)
    assert optimizer.steps == 1
    for weight, value in zip(net.weights(), expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-9, atol=1e-12)
    # One step per sub-network, as mmrazor does, ends elsewhere.
    for gates in subnets:
        weight_step(wrong, batches[:1], sgd(wrong.weights()), [gates], cross_entropy)
    assert (wrong.weights()[0] - expected[0]).abs().max() > 1e-6


def test_the_others_imitate_the_first() -> None:
    net, path, batches = made()
    subnets = sandwich(net, path, Sampling.UNIFORM, 1)
    outputs = [net(batches[0][0], gates) for gates in subnets]
    wanted = outputs[0].detach().softmax(dim=1)
    losses = [cross_entropy(outputs[0], batches[0])]
    losses += [F.kl_div(output.log_softmax(dim=1), wanted, reduction="batchmean") for output in outputs[1:]]
    slopes = torch.autograd.grad(torch.stack(losses).sum(), net.weights())
    expected = [weight.detach() - 0.1 * slope for weight, slope in zip(net.weights(), slopes, strict=True)]
    record = weight_step(net, batches[:1], sgd(net.weights()), subnets, cross_entropy)
    torch.testing.assert_close(record.losses.double(), torch.stack(losses).detach(), rtol=1e-5, atol=1e-6)
    for weight, value in zip(net.weights(), expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-4, atol=1e-6)  # imitation is float32


def test_several_batches_are_one_large_batch() -> None:
    net, path, batches = made(Plain)  # no norms: a batch and its halves are the same
    whole = copy.deepcopy(net)
    subnets = sandwich(net, path, Sampling.UNIFORM, 1, torch.Generator().manual_seed(0))
    large = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    budget = parse("50%", net.graph)
    for one, parts in ((net, batches), (whole, large)):
        optimizer = sgd(one.weights())
        weight_step(one, parts, optimizer, subnets, cross_entropy, distill=False)
        arch_step(one, parts, sgd(one.alphas()), path, cross_entropy, budget)
        assert optimizer.steps == 1
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_regression_output_cannot_be_imitated() -> None:
    net, path, batches = made()
    net.model.head = nn.Linear(11, 1).double()
    subnets = sandwich(net, path, Sampling.UNIFORM, 0)
    with pytest.raises(TrainingError, match="classes along dim 1"):
        weight_step(net, batches[:1], sgd(net.weights()), subnets, lambda output, batch: output.square().mean())
    with pytest.raises(TrainingError, match="must be one number"):
        weight_step(net, batches[:1], sgd(net.weights()), subnets, lambda output, batch: output)


# -- stage 2


@pytest.mark.parametrize("toy", [Chain, Residual, Depthwise], ids=lambda net: net.__name__)
def test_arch_step_computes_no_conv_weight_gradients(toy: Any) -> None:
    net, path, batches = made(toy)
    with Backwards() as backwards:
        arch_step(net, batches[:1], sgd(net.alphas()), path, cross_entropy, parse("50%", net.graph))
    assert backwards.convs > 0 and backwards.weight_gradients == 0


def test_budget_alone_does_not_run_the_network() -> None:
    net, path, batches = made()
    budget = parse("50%", net.graph)
    with Backwards() as backwards:
        record = arch_step(net, batches, sgd(net.alphas(), lr=10.0), path, None, budget)
    assert record.task_loss is None and backwards.convs == 0
    again = arch_step(net, batches, sgd(net.alphas()), path, None, budget)
    assert (record.ratios - 0.975).abs() > (again.ratios - 0.975).abs()  # nearer to the band


def step_slope(net: Any, path: Any, batches: Any, weight: float) -> Tensor:
    """The slope that arch_step follows: how far it goes at learning rate one."""
    before = net.alpha.detach().clone()
    arch_step(net, batches, sgd(net.alphas(), lr=1.0), path, cross_entropy, parse("50%", net.graph), weight)
    slope = before - net.alpha.detach()
    with torch.no_grad():
        net.alpha.copy_(before)
    return slope


@pytest.mark.parametrize("toy", [Chain, Residual, Depthwise], ids=lambda net: net.__name__)
def test_slope_is_that_of_gate_layers(toy: Any) -> None:
    net, path, batches = made(toy)
    explicit = EXPLICIT[toy](copy.deepcopy(net.model), batches[0][0], by_width(toy, net.graph, net.soft()))
    (expected,) = torch.autograd.grad(cross_entropy(explicit, batches[0]), net.alpha)
    torch.testing.assert_close(step_slope(net, path, batches[:1], 0.0), expected, rtol=1e-8, atol=1e-12)
    assert expected.count_nonzero() > expected.numel() // 2


def test_slope_is_that_of_finite_differences() -> None:
    net, path, batches = made()
    budget = parse("50%", net.graph)
    slope = step_slope(net, path, batches[:1], 0.1)

    def total() -> Tensor:
        seen = arch_step(net, batches[:1], sgd(net.alphas(), lr=0.0), path, cross_entropy, budget, 0.1)
        assert seen.task_loss is not None
        return seen.task_loss + 0.1 * seen.budget_loss

    for place in ((0, 0), (1, 2), (2, 1), (3, 0)):
        values = []
        for sign in (1, -1):
            net.alpha.data[place] += sign * 1e-5
            values.append(total())
            net.alpha.data[place] -= sign * 1e-5
        difference = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(slope[place], difference, rtol=1e-5, atol=1e-8)
        assert difference.abs() > 1e-5


def equations(net: Any, batch: Any, misprinted: bool = False) -> Tensor:
    """Slope of the loss by each alpha of the chain net, by equations 16 to 18, sum by sum."""
    model, gates = copy.deepcopy(net.model), by_width(Chain, net.graph, net.soft().detach())
    before, after, x = [], [], batch[0]
    for conv, norm, name in (
        (model.conv1, model.bn1, "a"),
        (model.conv2, model.bn2, "b"),
        (model.conv3, model.bn3, "c"),
    ):
        before.append(norm(conv(x)))  # O
        after.append(before[-1] * gates[name][:, None, None])  # O hat
        x = F.relu(after[-1])
    slopes = torch.autograd.grad(cross_entropy(model.head(x.flatten(1)), batch), after)
    result = torch.zeros_like(net.alpha)
    for space, sizes in enumerate(net.sizes.tolist()):
        group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        p = [1.0, *torch.sigmoid(net.alpha[space]).tolist()]
        for j in range(1, len(sizes)):
            for channel, k in enumerate(group_of):
                if k < j:
                    continue
                others = 1.0
                for r in range(k + 1):
                    others *= p[r] if r != j else 1.0
                own = p[k] * (1 - p[k]) if misprinted else p[j] * (1 - p[j])
                outer = (slopes[space][:, channel] * before[space][:, channel]).sum()
                result[space, j - 1] += (outer * own * others).detach()
    return result.detach()


def test_slope_is_that_of_the_papers_equations() -> None:
    net, path, batches = made(Chain)
    slope = step_slope(net, path, batches[:1], 0.0)
    torch.testing.assert_close(slope, equations(net, batches[0]), rtol=1e-7, atol=1e-10)
    assert (slope - equations(net, batches[0], misprinted=True)).abs().max() > 0.01 * slope.abs().max()
