"""weight_step and arch_step: what they change, what they leave alone bit for bit (I8), the alphas' gradient (I11)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import Backwards, Chain, Depthwise, NoNorms, Residual, by_width, sample, sandwich, supernet
from torch import Tensor
from torch.nn import functional as F

from dmcp.defaults import resolve_search
from dmcp.searching.budget import parse_budget
from dmcp.searching.steps import StepContext, add_size, arch_step, mean_size, weight_step
from dmcp.searching.subnets import make_chains
from dmcp.settings import Sampling, SearchConfig

Batches = list[tuple[Tensor, Tensor]]


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])  # in the dtype of the output, unlike the default loss


def made(toy: Any = Residual, loss: Any = cross_entropy, **settings: Any) -> tuple[StepContext, Batches]:
    """A supernet in float64 with random alphas and what its steps share, and two batches."""
    net, x, labels = supernet(toy), sample(toy.SHAPE, batch=8), torch.arange(8) % 5
    config = resolve_search(SearchConfig(budget="50%", **settings))
    budget = parse_budget("50%", net.graph)
    return StepContext(net=net, chains=make_chains(net), budget=budget, config=config, loss=loss), [
        (x[:4], labels[:4]),
        (x[4:], labels[4:]),
    ]


def subnets_of(context: StepContext, count: int) -> list[Tensor]:
    return sandwich(context.net, context.chains, Sampling.UNIFORM, count, torch.Generator().manual_seed(0))


def photograph(net: Any) -> dict[str, bytes]:
    """The bits of alphas, weights and buffers."""
    tensors = [("alpha", net.alpha), *net.model.named_parameters(), *net.model.named_buffers()]
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors}


def changed(net: Any, before: dict[str, bytes]) -> set[str]:
    return {name for name, bits in photograph(net).items() if bits != before[name]}


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr)


# I8: what a step leaves alone


def test_weight_step_leaves_the_alphas() -> None:
    context, batches = made()
    before = photograph(context.net)
    losses = weight_step(context, batches[:1], sgd(context.net.weights()), subnets_of(context, 2))
    after = changed(context.net, before)
    assert "alpha" not in after and context.net.alpha.grad is None
    assert after >= {name for name, _ in context.net.model.named_parameters()}
    assert losses.shape == (4,) and not losses.requires_grad


def test_arch_step_leaves_weights_and_buffers() -> None:
    context, batches = made()
    net = context.net
    flags = [weight.requires_grad_(number % 3 > 0).requires_grad for number, weight in enumerate(net.weights())]
    before = photograph(net)
    record = arch_step(context, batches[:1], sgd(net.alphas()))
    assert changed(net, before) == {"alpha"}
    assert [weight.requires_grad for weight in net.weights()] == flags
    assert all(weight.grad is None for weight in net.weights())
    assert record.task_loss is not None and not record.task_loss.requires_grad and not record.ratios.requires_grad
    net(batches[0][0], net.soft())
    assert "bn0.running_mean" in changed(net, before)  # a plain pass does change the statistics


# stage 1


@pytest.mark.parametrize("distill", [False, True])
def test_one_step_along_the_sum_of_all_gradients(distill: bool) -> None:
    """Also where the others learn from the first one's output, which is not trained by that."""
    context, batches = made(distill=distill)
    net, (x, labels) = context.net, batches[0]
    subnets = subnets_of(context, 2)
    outputs = [net(x, gates) for gates in subnets]
    losses = [F.cross_entropy(output, labels) for output in outputs]
    if distill:
        target = outputs[0].detach().softmax(dim=1)
        losses[1:] = [F.kl_div(it.log_softmax(dim=1), target, reduction="batchmean") for it in outputs[1:]]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), net.weights())
    expected = [weight.detach() - 0.1 * gradient for weight, gradient in zip(net.weights(), gradients, strict=True)]
    apart = copy.deepcopy(net)
    found = weight_step(context, batches[:1], sgd(net.weights()), subnets)
    near = {"rtol": 1e-4, "atol": 1e-6} if distill else {"rtol": 1e-9, "atol": 1e-12}  # distillation is float32
    torch.testing.assert_close(found.double(), torch.stack(losses).detach(), **near)
    for weight, value in zip(net.weights(), expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, **near)
    for gates in subnets:  # one optimizer step per sub-network ends elsewhere
        alone = replace(context, net=apart)
        weight_step(alone, batches[:1], sgd(apart.weights()), [gates])
    assert (apart.weights()[0] - expected[0]).abs().max() > 1e-6


@pytest.mark.parametrize("own_loss", [False, True])
def test_several_batches_are_one_large_batch(own_loss: bool) -> None:
    context, batches = made(NoNorms, distill=False)  # no norms: a batch and its halves are the same
    if own_loss:
        context = replace(context, loss_sizes=context.net.alpha.new_zeros(2))
    other = copy.deepcopy(context)
    large = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    for it, parts in ((context, batches), (other, large)):
        weight_step(it, parts, sgd(it.net.weights()), subnets_of(context, 1))
        arch_step(it, parts, sgd(it.net.alphas()))
    for a, b in zip(context.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# stage 2


@pytest.mark.parametrize("toy", [Chain, Residual, Depthwise], ids=lambda net: net.__name__)
def test_arch_step_computes_no_conv_weight_gradients(toy: Any) -> None:
    context, batches = made(toy)
    with Backwards() as backwards:
        arch_step(context, batches[:1], sgd(context.net.alphas()))
    assert backwards.convs > 0 and backwards.weight_gradients == 0


def test_budget_alone_does_not_run_the_network() -> None:
    context, batches = made(task_loss=False)
    with Backwards() as backwards:
        record = arch_step(context, batches, sgd(context.net.alphas(), lr=10.0))
    assert record.task_loss is None and backwards.convs == 0
    again = arch_step(context, batches, sgd(context.net.alphas()))
    assert (record.ratios - 0.975).abs() > (again.ratios - 0.975).abs()  # nearer to the band


def step_gradient(context: StepContext, batches: Any) -> Tensor:
    """The gradient that arch_step follows: how far it goes at learning rate one."""
    before = context.net.alpha.detach().clone()
    arch_step(context, batches, sgd(context.net.alphas(), lr=1.0))
    gradient = before - context.net.alpha.detach()
    with torch.no_grad():
        context.net.alpha.copy_(before)
    return gradient


def test_gradient_is_that_of_finite_differences() -> None:
    context, batches = made()
    gradient, alpha = step_gradient(context, batches[:1]), context.net.alpha.data

    def total() -> Tensor:
        seen = arch_step(context, batches[:1], sgd(context.net.alphas(), lr=0.0))
        assert seen.task_loss is not None
        return seen.task_loss + 0.1 * seen.budget_loss

    for place in ((0, 0), (1, 2), (2, 1), (3, 0)):
        values = []
        for sign in (1, -1):
            alpha[place] += sign * 1e-5
            values.append(total())
            alpha[place] -= sign * 1e-5
        difference = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(gradient[place], difference, rtol=1e-5, atol=1e-8)
        assert difference.abs() > 1e-5


@pytest.mark.parametrize("shift", [0.0, -10.0], ids=["positive", "negative"])
def test_an_own_loss_counts_relative_to_its_mean_size(shift: float) -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return cross_entropy(output, batch) + shift

    context, batches = made(loss=loss, budget_weight=0.0)
    own = replace(context, loss_sizes=context.net.alpha.new_zeros(2))
    sizes = []
    for batch in batches:
        plain = arch_step(context, [batch], sgd(context.net.alphas(), lr=0.0))
        assert plain.task_loss is not None and plain.task_loss * (1 + shift) > 0
        sizes.append(plain.task_loss.abs())
        expected = step_gradient(context, [batch]) / torch.stack(sizes).mean()
        torch.testing.assert_close(step_gradient(own, [batch]), expected)
        assert expected.abs().max() > 1e-4


def test_a_loss_that_was_always_zero_keeps_its_gradient() -> None:
    """As one that is made for its gradient alone."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        value = cross_entropy(output, batch)
        return value - value.detach()

    context, batches = made(loss=loss, budget_weight=0.0)
    gradient = step_gradient(context, batches[:1])
    own = replace(context, loss_sizes=context.net.alpha.new_zeros(2))
    assert torch.equal(step_gradient(own, batches[:1]), gradient) and gradient.abs().max() > 0.001


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_does_not_count_in_the_mean_size(bad: float) -> None:
    """A loop of the user's own may skip such a step and go on."""
    sizes = torch.zeros(2)
    for value in (1000.0, bad, -500.0):
        add_size(sizes, torch.tensor(value))
    assert mean_size(sizes) == 750
    only_bad = torch.zeros(2)
    add_size(only_bad, torch.tensor(bad))
    assert mean_size(only_bad) == 1


def equations(net: Any, batch: Any, misprinted: bool = False) -> Tensor:
    """Gradient of the loss by each alpha of the chain net, by equations 16 to 18, sum by sum."""
    model, gates = copy.deepcopy(net.model), by_width(Chain, net.graph, net.soft().detach())
    before, after, x = [], [], batch[0]
    for number, name in ((1, "a"), (2, "b"), (3, "c")):
        before.append(model.get_submodule(f"bn{number}")(model.get_submodule(f"conv{number}")(x)))  # O
        after.append(before[-1] * gates[name][:, None, None])  # O hat
        x = F.relu(after[-1])
    outer = torch.autograd.grad(cross_entropy(model.head(x.flatten(1)), batch), after)
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
                summed = (outer[space][:, channel] * before[space][:, channel]).sum()
                result[space, j - 1] += (summed * own * others).detach()
    return result.detach()


def test_gradient_is_that_of_the_papers_equations() -> None:
    context, batches = made(Chain, budget_weight=0.0)
    gradient = step_gradient(context, batches[:1])
    torch.testing.assert_close(gradient, equations(context.net, batches[0]), rtol=1e-7, atol=1e-10)
    wrong = equations(context.net, batches[0], misprinted=True)
    assert (gradient - wrong).abs().max() > 0.01 * gradient.abs().max()
