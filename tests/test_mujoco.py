"""Continuous control environments against gymnasium's own ones, stepped separately, and the policy's distribution."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import frozen, short_args, spy

# How many coordinates of the position, which come first, an observation leaves out; none depends on where they are.
HIDDEN = {"Ant": 2, "HalfCheetah": 1, "Hopper": 1, "Humanoid": 2, "HumanoidStandup": 2, "InvertedPendulum": 0}
HIDDEN |= {"Swimmer": 2, "Walker2d": 1}
TASKS = [*HIDDEN, "InvertedDoublePendulum", "Pusher", "Reacher"]
both_ways = pytest.mark.parametrize("envpool", [True, False])


def make_envs(mujoco, env_id, num_envs, seed=0, envpool=True):
    return mujoco.Environments(mujoco.Args(env_id=env_id, num_envs=num_envs, envpool=envpool), seed)


def random_actions(rng, envs):
    """In halves, which can be scaled exactly, to the bounds and beyond."""
    return rng.integers(-2, 3, (envs.num_envs, *envs.single_action_space.shape)).astype(np.float32) / 2


def test_episodes_equal_those_of_a_single_environment(mujoco):
    """Cut after 200 steps, and reset in the same step: the next one is the first of the next episode."""
    seed, num_envs = 5, 3
    envs = make_envs(mujoco, "Pendulum-v1", num_envs, seed, envpool=False)
    obs, singles = envs.reset(), [gym.make("Pendulum-v1") for _ in range(num_envs)]
    for i, single in enumerate(singles):
        np.testing.assert_array_equal(obs[i], single.reset(seed=seed + i)[0])
    rng, ends = np.random.default_rng(0), []
    for step in range(1, 410):
        actions = random_actions(rng, envs.envs)
        obs, rewards, terminated, truncated, final_obs, ended = envs.step(actions)
        assert (ended == (terminated | truncated)).all()
        for i, single in enumerate(singles):
            true_obs, reward, *true_ends, _ = single.step(envs.action_space.high * actions[i])
            assert (terminated[i], truncated[i]) == tuple(true_ends)
            assert rewards[i] == reward
            np.testing.assert_array_equal(final_obs[i], true_obs)
            if any(true_ends):
                true_obs, _ = single.reset()
                ends.append((step, i))
            np.testing.assert_array_equal(obs[i], true_obs)
    assert ends == [(step, i) for step in (200, 400) for i in range(num_envs)]


def restart(single, env_id, obs):
    """Begins an episode of a single environment at the state of an observation."""
    single.reset()
    base, task = single.unwrapped, env_id.removesuffix("-v5")
    position, velocity = base.init_qpos.copy(), base.init_qvel.copy()
    if task == "InvertedDoublePendulum":
        position[:], velocity[:] = [obs[0], *np.arctan2(obs[1:3], obs[3:5])], obs[5:8]
    elif task == "Reacher":
        position[:], velocity[:2] = [*np.arctan2(obs[2:4], obs[:2]), *obs[4:6]], obs[6:8]
    elif task == "Pusher":
        bodies = [obs[k : k + 2] - base.model.body(name).pos[:2] for k, name in ((17, "object"), (20, "goal"))]
        position[:] = [*obs[:7], *bodies[0][::-1], *bodies[1][::-1]]  # their joints are y, x
        velocity[:7] = obs[7:14]
    else:
        hidden, seen = HIDDEN[task], base.model.nq - HIDDEN[task]
        position[:hidden], position[hidden:], velocity[:] = 0, obs[:seen], obs[seen : seen + base.model.nv]
    base.set_state(position, velocity)


@both_ways
@pytest.mark.parametrize("task", TASKS)
def test_episodes_equal_those_of_gymnasium_from_the_same_state(mujoco, task, envpool):
    """Hopper, Walker2d and the pendulums fall, Reacher is cut after 50 steps and Pusher after 100. The observation that
    comes with an end is the last of its episode, and the next step is the first of the next."""
    env_id, num_envs, num_steps, tolerance = f"{task}-v5", 3, 110, 1e-6  # EnvPool's rewards are in single precision
    if task == "HalfCheetah":
        num_steps = 25  # chaotic: rounding grows
    elif task in ("Ant", "Humanoid", "HumanoidStandup"):  # EnvPool has a MuJoCo of its own, which steps free bodies a
        num_steps, tolerance = (
            2,
            5e-3 if envpool else 1e-5,
        )  # little differently (0.1 % in two steps), so that paths part
    envs = make_envs(mujoco, env_id, num_envs, 1, envpool)
    assert envs.in_envpool == envpool
    obs, singles, ends = envs.reset(), [gym.make(env_id) for _ in range(num_envs)], []
    for single, start in zip(singles, obs, strict=True):
        restart(single, env_id, start)
    rng = np.random.default_rng(0)
    for step in range(1, num_steps + 1):
        actions = random_actions(rng, envs.envs)
        obs, rewards, terminated, truncated, final_obs, ended = envs.step(actions)
        assert (ended == (terminated | truncated)).all()
        for i, single in enumerate(singles):
            true_obs, reward, *true_ends, _ = single.step(envs.action_space.high * actions[i])
            assert [terminated[i], truncated[i]] == true_ends
            np.testing.assert_allclose(final_obs[i], true_obs, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(rewards[i], reward, rtol=tolerance, atol=tolerance)
            if ended[i]:
                ends.append((step, i))
                restart(single, env_id, obs[i])
                assert abs(obs[i] - final_obs[i]).max() > 1e-3
            else:
                np.testing.assert_array_equal(obs[i], final_obs[i])
    limit = gym.spec(env_id).max_episode_steps
    if limit < 200:
        assert ends == [(step, i) for step in range(limit, 111, limit) for i in range(num_envs)]
    else:
        assert (len(ends) > 3) == (num_steps == 110 and task != "Swimmer")


@pytest.mark.parametrize("task", TASKS)
def test_time_limits_are_those_of_gymnasium(mujoco, task):
    envs = make_envs(mujoco, f"{task}-v5", 1).envs
    assert envs.spec.config.max_episode_steps == gym.spec(f"{task}-v5").max_episode_steps


@both_ways
def test_truncated_steps_bootstrap_from_their_own_last_observation(mujoco, monkeypatch, tmp_path, envpool):
    """Returns are made a known function of the state, and the networks too slow to change: next_g can be computed
    afterwards. Reacher is cut after 50 steps."""
    monkeypatch.setattr(mujoco.ReturnModel, "sample", lambda self, c, n: c.sum(-1).expand(n, *c.shape[:-1]).clone())
    steps, gae = spy(monkeypatch, mujoco.Environments, "step"), spy(monkeypatch, mujoco, "k_step_gae")
    options = dict(env_id="Reacher-v5", envpool=envpool, num_steps=104, iterations=1, eta=0.0)
    agent = mujoco.train(short_args(mujoco, tmp_path, **options, **frozen(mujoco)))
    (_, g, next_g, terminations, dones, *_), _ = gae[0]
    agent.obs_stats = mujoco.RunningMeanStd(agent.obs_stats.mean.shape)  # as it was during the rollout

    def return_of(raw_obs):
        with torch.no_grad():
            return agent.trunk(agent.observe(raw_obs)).sum(-1)

    assert not terminations.any() and torch.nonzero(dones).tolist() == [[49, 0], [49, 1], [99, 0], [99, 1]]
    for t, (_, (obs, _, _, truncated, final_obs, _)) in enumerate(steps):
        if truncated.any():
            torch.testing.assert_close(next_g[t], return_of(final_obs), rtol=1e-4, atol=1e-4)
            assert (next_g[t] - return_of(obs)).abs().min() > 1e-2  # the next episode's start would have been noticed
        elif t + 1 < len(steps):
            assert torch.equal(next_g[t], g[t + 1])


class EchoAction(gym.Env):
    """Shows the action that arrived, with bounds that are not symmetric."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(np.array([-2.0, 1.0], dtype=np.float32), np.array([2.0, 5.0], dtype=np.float32))

    def reset(self, seed=None, options=None):
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        return np.asarray(action, dtype=np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    "action, arrives",  # beyond ±1: clipped
    [([-1, -1], [-2, 1]), ([1, 1], [2, 5]), ([0, 0], [0, 3]), ([0.5, -0.5], [1, 2]), ([-7, 7], [-2, 5])],
)
def test_actions_are_scaled_to_the_bounds(mujoco, action, arrives):
    """Of a task that EnvPool does not have, so that gymnasium steps it."""
    if "EchoAction-v0" not in gym.registry:
        gym.register("EchoAction-v0", EchoAction)
    envs = make_envs(mujoco, "EchoAction-v0", 1)
    envs.reset()
    obs, *_ = envs.step(np.array([action], dtype=np.float32))
    assert obs[0].tolist() == arrives and not envs.in_envpool


def test_pictures_come_from_gymnasium(mujoco):
    envs = mujoco.Environments(mujoco.Args(env_id="Hopper-v5", num_envs=1), 0, render_mode="rgb_array")
    assert not envs.in_envpool and envs.envs.envs[0].render_mode == "rgb_array"


@both_ways
def test_the_seed_decides_all_episodes_and_they_differ(mujoco, envpool):
    def play(seed):
        envs, rng = make_envs(mujoco, "Hopper-v5", 4, seed, envpool), np.random.default_rng(0)
        starts = [envs.reset()]
        for _ in range(100):
            obs, *_, ended = envs.step(random_actions(rng, envs.envs))
            starts += [obs[i : i + 1] for i in np.flatnonzero(ended)]
        return np.concatenate(starts)

    starts, again, other = play(3), play(3), play(1000)
    np.testing.assert_array_equal(starts, again)
    assert len(starts) > 8 and len(np.unique(np.concatenate([starts, other]), axis=0)) == len(starts) + len(other)


def test_policy_is_a_gaussian_with_the_same_spread_in_all_states(mujoco):
    agent_args = dict(obs_dim=5, action_dim=3, log_std_init=-0.5)
    policy, obs = mujoco.Policy(**agent_args), torch.randn(7, 5)
    torch.testing.assert_close(policy(obs, None).stddev, torch.full((7, 3), math.exp(-0.5)))
    policy.log_std.data = torch.tensor([-1.0, 0.0, 0.7])
    distribution = policy(obs, None)
    mean, std = policy.mean(obs), np.exp([-1.0, 0.0, 0.7])
    assert mean.abs().max() < 0.1  # at first the middle of the action range
    torch.testing.assert_close(distribution.mode, mean)
    actions = distribution.sample((4,))
    errors = (actions - mean).detach().double().numpy() / std
    log_probs = (-(errors**2) / 2 - np.log(std) - math.log(2 * math.pi) / 2).sum(-1)
    np.testing.assert_allclose(distribution.log_prob(actions).detach(), log_probs, rtol=1e-5, atol=1e-5)
    entropy = (np.log(std) + (1 + math.log(2 * math.pi)) / 2).sum()
    np.testing.assert_allclose(distribution.entropy().detach(), np.full(7, entropy), rtol=1e-6)
    samples = distribution.sample((20_000,))
    np.testing.assert_allclose(samples.mean(0), mean.detach(), atol=0.06)  # four standard errors of the widest
    np.testing.assert_allclose(samples.std(0), np.tile(std, (7, 1)), rtol=0.02)
