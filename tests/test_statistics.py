"""Running statistics against numpy on the whole stream at once."""

import numpy as np
import pytest
import torch
from conftest import make_agent, short_args, spy


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("offset, scale", [(0.0, 1.0), (1e6, 1.0), (-3.0, 1e-3)])
def test_running_statistics_equal_those_of_the_whole_stream(shared, shape, offset, scale):
    stats = shared.RunningMeanStd(shape)
    batches = [offset + scale * np.random.standard_normal((size, *shape)) for size in (1, 7, 1, 300, 16, 2)]
    for end, batch in enumerate(batches, start=1):
        stats.update(torch.as_tensor(batch))
        seen = np.concatenate(batches[:end])
        np.testing.assert_allclose(stats.mean.numpy(), seen.mean(0), rtol=1e-12, atol=1e-12)
        # A large offset costs the squares that many digits, in numpy as here.
        np.testing.assert_allclose(stats.var.numpy(), seen.var(0), rtol=1e-6, atol=1e-9 * scale**2)
        np.testing.assert_allclose(stats.std.numpy(), np.sqrt(seen.var(0) + 1e-8), rtol=1e-6)
        assert stats.count == len(seen)


def test_float32_batches_are_summed_in_double(shared):
    """1e6 + noise keeps 4 bits of noise in a float32: what is left of it must not be lost to the sums."""
    batch = (1e6 + 4 * torch.randn(5000)).float()
    stats = shared.RunningMeanStd()
    for part in batch.split(17):
        stats.update(part)
    np.testing.assert_allclose(stats.var.item(), batch.double().numpy().var(), rtol=1e-9)


def test_statistics_are_saved_with_the_agent(script):
    agent, _, _ = make_agent(script)
    agent.reward_stats.update(torch.randn(10))
    copy, _, _ = make_agent(script)
    copy.load_state_dict(agent.state_dict())
    for name in ("mean", "var", "std", "count"):
        assert getattr(copy.reward_stats, name) == getattr(agent.reward_stats, name)


def test_rewards_are_scaled_by_discounted_sums_that_stop_at_episode_ends(script, tmp_path, monkeypatch, short_games):
    """They go on from one rollout to the next; the standard deviation is that of all sums so far."""
    steps, scaled = spy(monkeypatch, script.Environments, "step"), spy(monkeypatch, script, "k_step_gae")
    agent = script.train(short_args(script, tmp_path, iterations=3, gamma=0.9, update_epochs=1))
    rewards, terminations, truncations = (np.array([result[k] for _, result in steps]) for k in (1, 2, 3))
    sums = np.zeros(rewards.shape)
    for i in range(2):
        start = 0
        for t in range(len(rewards)):
            sums[t, i] = sum(0.9 ** (t - s) * rewards[s, i] for s in range(start, t + 1))
            start = t + 1 if terminations[t, i] or truncations[t, i] else start
    assert rewards.any() and truncations.any() and len(sums) == 48
    np.testing.assert_allclose(agent.reward_stats.std, np.sqrt(sums.var() + 1e-8), rtol=1e-6)
    assert agent.reward_stats.count == sums.size
    for n, (inputs, _) in enumerate(scaled[:: len(scaled) // 3]):
        expected = rewards[16 * n : 16 * n + 16] / np.sqrt(sums[: 16 * n + 16].var() + 1e-8)
        np.testing.assert_allclose(inputs[0], expected.clip(-10, 10), rtol=1e-5, atol=1e-6)


def test_observations_are_standardised_by_what_was_seen(mujoco):
    agent, _, _ = make_agent(mujoco)
    batches = np.random.standard_normal((20, 8, 3)) * [1.0, 1e-2, 1e3] + [0.0, 5.0, -1e4]
    for end, batch in enumerate(batches, start=1):
        normal = agent.observe(batch)
        seen = batches[:end].reshape(-1, 3)
        expected = (batch - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
        np.testing.assert_allclose(normal.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert normal.dtype == torch.float32
    assert agent.observe(np.full((1, 3), 1e9), learn=False).tolist() == [[10.0] * 3]  # outliers are clipped


def test_observing_without_learning_leaves_the_statistics_alone(mujoco):
    agent, _, _ = make_agent(mujoco)
    agent.observe(np.random.standard_normal((5, 3)))
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    agent.observe(np.random.standard_normal((5, 3)) + 100, learn=False)
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())
