"""Advantages and Bellman targets against sums written out term by term."""

import pytest
import torch
from conftest import lambda_weights, n_step_target, rollout
from torch.utils._python_dispatch import TorchDispatchMode

T, N = 12, 3
WINDOWS = [1, 2, 5, T - 1, T, T + 3]
DISCOUNTS = [(0.99, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 1.0), (0.97, 0.0), (0.0, 0.9)]
pytestmark = pytest.mark.usefixtures("double_precision")
close = dict(rtol=1e-12, atol=1e-12)


def lambda_target(rewards, next_g, terminations, dones, gamma, gae_lambda, k, t, i):
    """The λ-weighted mixture of the n-step targets, n = 1 ... k."""
    targets = [n_step_target(rewards, next_g, terminations, dones, gamma, t, i, n) for n in range(1, k + 1)]
    return float(lambda_weights(gae_lambda, k) @ targets)


def brute_force_advantage(rewards, g, next_g, terminations, dones, gamma, gae_lambda, k, t, i):
    total = 0.0
    for l in range(min(k, len(rewards) - t)):  # noqa: E741
        s = t + l
        bootstrap = 0.0 if terminations[s, i] else next_g[s, i]
        total += (gamma * gae_lambda) ** l * (rewards[s, i] + gamma * bootstrap - g[s, i])
        if dones[s, i]:
            break
    return total


def for_every_step(value, like):
    steps, columns = like.shape
    return torch.tensor([[float(value(t, i)) for i in range(columns)] for t in range(steps)], dtype=like.dtype)


@pytest.mark.parametrize("k", WINDOWS)
@pytest.mark.parametrize("gamma, gae_lambda", DISCOUNTS)
@pytest.mark.parametrize("p_end", [0.0, 0.15, 0.6])
def test_advantages_equal_the_double_loop(shared, k, gamma, gae_lambda, p_end):
    batch = rollout(T, N, seed=k, p_end=p_end)
    options = (gamma, gae_lambda, k)
    expected = for_every_step(lambda t, i: brute_force_advantage(*batch, *options, t, i), batch[0])
    torch.testing.assert_close(shared.k_step_gae(*batch, *options), expected, **close)


@pytest.mark.parametrize("k", WINDOWS)
@pytest.mark.parametrize("gamma, gae_lambda", DISCOUNTS)
def test_bellman_targets_are_the_lambda_mixture_of_n_step_targets(shared, k, gamma, gae_lambda):
    """The telescoped form needs next_g[t] = g[t+1] inside an episode, which is what a rollout has."""
    rewards, g, *rest = rollout(T, N, seed=k)
    options = (gamma, gae_lambda, k)
    x = shared.k_step_gae(rewards, g, *rest, *options) + g
    expected = for_every_step(lambda t, i: lambda_target(rewards, *rest, *options, t, i), rewards)
    torch.testing.assert_close(x, expected, **close)


def test_truncated_steps_bootstrap_and_terminated_ones_do_not(shared):
    """By how a target answers to a shift of the next state's return: by γ after a truncation, not a termination."""
    rewards, g, next_g, terminations, dones = rollout(T, N, p_end=0.5)
    assert terminations.any() and (dones & ~terminations).any()
    ends = (terminations, dones, 0.9, 0.7, T)
    shifted = next_g + dones  # only next states of ended episodes
    moved_gae = shared.k_step_gae(rewards, g, shifted, *ends) - shared.k_step_gae(rewards, g, next_g, *ends)
    draw = lambda bootstrap: (torch.manual_seed(5), shared.sr_targets(rewards, bootstrap, *ends))[1]  # noqa: E731
    moved_sr = draw(shifted) - draw(next_g)
    for moved in (moved_gae, moved_sr):
        torch.testing.assert_close(moved[dones], 0.9 * (~terminations[dones]).double(), **close)


@pytest.mark.parametrize("k", WINDOWS)
@pytest.mark.parametrize("gae_lambda", [0.3, 0.9])
def test_sampled_targets_are_n_step_targets_with_geometric_frequencies(shared, k, gae_lambda):
    """Every draw is one of the enumerated n-step targets, as often as its weight says; their mean is the λ target."""
    draws, gamma = 4000, 0.9
    rewards, g, next_g, terminations, dones = rollout(T, N, seed=k + 1)
    batch = (rewards, next_g, terminations, dones)
    copies = [v.repeat(1, draws) for v in batch]  # columns are independent, so one call draws for all copies
    x = shared.sr_targets(*copies, gamma, gae_lambda, k).reshape(T, draws, N)
    for t in range(T):
        for i in range(N):
            weight_of = {}  # n that reach past an end give the same target: their weights add up
            for n, weight in enumerate(lambda_weights(gae_lambda, k), start=1):
                target = n_step_target(*batch, gamma, t, i, n)
                weight_of[target] = weight_of.get(target, 0) + weight
            targets = torch.tensor(list(weight_of), dtype=torch.float64)
            weights = torch.tensor(list(weight_of.values()), dtype=torch.float64)
            distance, which = (x[t, :, i, None] - targets).abs().min(1)
            assert distance.max() < 1e-12
            counts = torch.bincount(which, minlength=len(targets))
            # 5 standard deviations of a binomial count, and 3 for rare targets: no false alarm in thousands of checks.
            allowed = 5 * (draws * weights * (1 - weights)).sqrt() + 3 * (weights < 1)
            assert ((counts - draws * weights).abs() <= allowed + 1e-9).all(), (t, i, counts, draws * weights)
            standard_error = x[t, :, i].std() / draws**0.5
            lambda_mean = lambda_target(*batch, gamma, gae_lambda, k, t, i)
            assert abs(x[t, :, i].mean() - lambda_mean) <= 5 * standard_error + 1e-12


@pytest.mark.parametrize(
    "gae_lambda, k, n", [(1.0, T, T), (1.0, 4, 4), (1.0, T + 3, T), (0.0, T, 1), (0.0, 4, 1), (0.8, 1, 1)]
)
def test_sampled_targets_without_chance(shared, gae_lambda, k, n):
    rewards, g, next_g, terminations, dones = rollout(T, N)
    batch = (rewards, next_g, terminations, dones)
    expected = for_every_step(lambda t, i: n_step_target(*batch, 0.9, t, i, n), rewards)
    torch.testing.assert_close(shared.sr_targets(*batch, 0.9, gae_lambda, k), expected, **close)


def test_float32_windows_do_not_cancel(shared):
    """A window is a difference of two long sums: in single precision it must still be right where returns are large."""
    batch = rollout(256, 4, dtype=torch.float32, p_end=0.0)
    batch = (batch[0] + 10, batch[1] + 500, batch[2] + 500, *batch[3:])
    exact = shared.k_step_gae(*(v.double() if v.is_floating_point() else v for v in batch), 0.99, 1.0, 5)
    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(shared.k_step_gae(*batch, 0.99, 1.0, 5).double(), exact, rtol=0, atol=0.05)


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.elements += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


@pytest.mark.parametrize("name", ["k_step_gae", "sr_targets"])
def test_work_is_linear_in_the_rollout_for_every_window(shared, name):
    def work(steps, k):
        rewards, g, next_g, terminations, dones = rollout(steps, N)
        inputs = (rewards, g, next_g) if name == "k_step_gae" else (rewards, next_g)
        with CountOperations() as counter:
            getattr(shared, name)(*inputs, terminations, dones, 0.9, 0.8, k)
        return counter.operations, counter.elements

    whole_operations, whole_elements = work(128, 128)
    for k in (1, 8, 64, 127):
        operations, elements = work(128, k)
        assert operations <= whole_operations + 30  # a constant number on top of the recursion
        assert elements <= whole_elements + 30 * 128 * N  # each of which is linear in the rollout
    assert work(256, 64)[0] < 2.2 * work(128, 64)[0]
