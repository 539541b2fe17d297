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
        agent.obs_stats.update(torch.tensor(batch))
        normal = agent.observe(batch)
        seen = batches[:end].reshape(-1, 3)
        expected = (batch - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
        np.testing.assert_allclose(normal.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert normal.dtype == torch.float32
    assert agent.observe(np.full((1, 3), 1e9)).tolist() == [[10.0] * 3]  # outliers are clipped


def test_a_rollout_is_standardised_by_the_statistics_of_those_before(mujoco, tmp_path, monkeypatch):
    """Observing alone moves nothing: whatever a rollout sees, its last states included, it sees in the same way."""
    observed, steps = spy(monkeypatch, mujoco.Agent, "observe"), spy(monkeypatch, mujoco.Environments, "step")
    agent = mujoco.train(short_args(mujoco, tmp_path, env_id="ShortHopper-v0", iterations=3, num_steps=32))
    raw = [result[0] for _, result in steps]  # of each step
    cuts = 0
    for n in range(3):
        seen = np.concatenate(raw[: 32 * n]) if n else None
        mean, std = (seen.mean(0), np.sqrt(seen.var(0) + 1e-8)) if n else (0, 1)
        inputs = {id(result[0]): None for _, result in steps[32 * n : 32 * (n + 1)]}
        mine = [(args[1], normal) for args, normal in observed if id(args[1]) in inputs]
        assert len(mine) == 32
        for obs, normal in mine:
            np.testing.assert_allclose(normal, ((obs - mean) / std).clip(-10, 10), rtol=1e-3, atol=1e-4)
        last = np.stack([r[4][i] for _, r in steps[32 * n : 32 * (n + 1)] for i in np.flatnonzero(r[3] & ~r[2])])
        cuts += len(last)
        (normal,) = [normal for args, normal in observed if args[1].shape == last.shape and (args[1] == last).all()]
        np.testing.assert_allclose(normal, ((last - mean) / std).clip(-10, 10), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(agent.obs_stats.mean, np.concatenate(raw).mean(0), rtol=1e-6, atol=1e-9)
    assert cuts >= 3 and agent.obs_stats.count == 96 * 2
