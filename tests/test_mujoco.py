"""Continuous control environments against separately stepped ones."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import short_args
from torch.distributions import Independent, Normal


def make_envs(mujoco, env_id, num_envs):
    return mujoco.make_envs(mujoco.Args(env_id=env_id, num_envs=num_envs), None)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("env_id, length", [("Pendulum-v1", 200), ("Hopper-v5", None)])
def test_episodes_equal_those_of_a_single_environment(mujoco, monkeypatch, env_id, length, num_processes):
    """Pendulum is cut after 200 steps, Hopper falls. The next episode starts in the same step: no step is lost to the reset. The
    number of processes that share the environments makes no difference."""
    monkeypatch.setattr(mujoco, "NUM_PROCESSES", num_processes)
    seed, num_envs = 5, 5
    envs = make_envs(mujoco, env_id, num_envs)
    assert len(envs.processes) == min(num_processes, num_envs) - 1
    obs = mujoco.reset_envs(envs, seed)
    singles = [gym.make(env_id) for _ in range(num_envs)]
    for i, single in enumerate(singles):
        np.testing.assert_array_equal(obs[i], single.reset(seed=seed + i)[0])
    bound = envs.single_action_space.high[0]
    rng, ends = np.random.default_rng(0), []
    for step in range(1, 410):
        actions = rng.integers(-2, 3, (num_envs, *envs.single_action_space.shape)) / np.float32(2)  # halves: scaling them is exact
        obs, rewards, terminated, truncated, final_obs, game_over = mujoco.step_envs(envs, actions)
        assert (game_over == (terminated | truncated)).all()
        for i, single in enumerate(singles):
            true_obs, reward, *true_ends, _ = single.step(bound * actions[i])
            assert (terminated[i], truncated[i]) == tuple(true_ends)
            assert rewards[i] == reward
            if any(true_ends):
                np.testing.assert_array_equal(final_obs[i], true_obs)
                true_obs, _ = single.reset()
                ends.append((step, i))
            np.testing.assert_array_equal(obs[i], true_obs)
    envs.close()
    assert ends == [(step, i) for step in (200, 400) for i in range(num_envs)] if length else len(ends) > 10


def test_processes_end_with_the_environments_and_ignore_signals(mujoco, monkeypatch):
    """Ctrl-C and a SIGTERM to all processes let the main one end its iteration, for which it needs the others."""
    monkeypatch.setattr(mujoco, "NUM_PROCESSES", 3)
    envs = make_envs(mujoco, "Pendulum-v1", 4)
    mujoco.reset_envs(envs, 0)
    processes = envs.processes
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    mujoco.step_envs(envs, np.zeros((4, 1), dtype=np.float32))
    assert len(processes) == 2 and all(process.is_alive() for process in processes)
    envs.close()
    assert not any(process.is_alive() for process in processes)
    envs.close()  # once more does no harm


def run_code(mujoco, code):
    """Python code, in which `make(env_id)` makes four environments in three processes; it has a minute."""
    start = f"""
import multiprocessing, os, signal, time, gymnasium as gym, {mujoco.__name__} as script
script.NUM_PROCESSES = 3
def make(env_id):
    envs = script.make_envs(script.Args(env_id=env_id, num_envs=4), None)
    script.reset_envs(envs, 0)
    print(*(process.pid for process in envs.processes), flush=True)
    return envs
"""
    command = [sys.executable, "-c", start + textwrap.dedent(code)]
    return subprocess.run(command, cwd=Path(mujoco.__file__).parent, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_processes_end_when_the_main_one_is_killed(mujoco, when):
    killed = run_code(
        mujoco,
        f"""
        envs = make("Pendulum-v1")
        def die(actions):
            time.sleep(0.3)  # the others have answered by then
            os.kill(os.getpid(), signal.SIGKILL)
        envs.row.step = die
        {"die(None)" if when == "between steps" else "envs.step(script.np.zeros((4, 1)))"}
        """,
    )
    assert killed.returncode == -signal.SIGKILL and killed.stderr == ""
    deadline = time.time() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in killed.stdout.split()):
        assert time.time() < deadline, "an orphan goes on"
        time.sleep(0.05)


def test_processes_end_with_a_main_one_that_never_closed_them(mujoco):
    """Be it a program's or itself a process of multiprocessing."""
    ended = run_code(
        mujoco,
        """
        child = multiprocessing.get_context("fork").Process(target=make, args=("Pendulum-v1",))
        child.start()
        child.join()
        make("Pendulum-v1")
        raise SystemExit(child.exitcode)
        """,
    )
    assert ended.returncode == 0 and len(ended.stdout.split()) == 4


def test_a_failure_in_another_process_ends_the_run(mujoco):
    failed = run_code(
        mujoco,
        """
        from gymnasium.envs.classic_control import PendulumEnv
        class Fails(PendulumEnv):
            def step(self, action):
                assert multiprocessing.current_process().name != "Process-1", "the second row is out of order"
                return super().step(action)
        gym.register("Fails-v0", Fails)
        make("Fails-v0").step(script.np.zeros((4, 1)))
        """,
    )
    assert failed.returncode == 1 and "the second row is out of order" in failed.stderr
    assert failed.stderr.endswith("RuntimeError: a process that steps environments has ended; what it said is above\n")


def test_the_number_of_processes_does_not_change_a_run(mujoco, monkeypatch, tmp_path):
    agents = []
    for num_processes in (1, 2):
        monkeypatch.setattr(mujoco, "NUM_PROCESSES", num_processes)
        agents.append(mujoco.train(short_args(mujoco, tmp_path / str(num_processes), env_id="Hopper-v5", iterations=3)))
    first, second = (agent.state_dict() for agent in agents)
    assert all(torch.equal(first[name], second[name]) for name in first)


class EchoAction(gym.Env):
    """Shows the action that arrived, with bounds that are not symmetric."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(np.array([-2.0, 1.0], dtype=np.float32), np.array([2.0, 5.0], dtype=np.float32))

    def reset(self, seed=None, options=None):
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        return np.asarray(action, dtype=np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    "action, arrives",
    [([-1, -1], [-2, 1]), ([1, 1], [2, 5]), ([0, 0], [0, 3]), ([0.5, -0.5], [1, 2]), ([-7, 7], [-2, 5])],  # beyond ±1: clipped
)
def test_actions_are_scaled_to_the_bounds(mujoco, action, arrives):
    if "EchoAction-v0" not in gym.registry:
        gym.register("EchoAction-v0", EchoAction)
    envs = make_envs(mujoco, "EchoAction-v0", 1)
    mujoco.reset_envs(envs, 0)
    obs, *_ = mujoco.step_envs(envs, np.array([action], dtype=np.float32))
    assert obs[0].tolist() == arrives


def test_environments_start_differently(mujoco):
    obs = mujoco.reset_envs(make_envs(mujoco, "Pendulum-v1", 4), 0)
    assert len(np.unique(obs, axis=0)) == 4


def test_videos_are_recorded_of_the_first_environment(mujoco, tmp_path, monkeypatch):
    """Into the run's folder, which is there by then; a refused task makes none."""
    recorded = []
    monkeypatch.setattr(gym.wrappers, "RecordVideo", lambda env, folder, **options: recorded.append((env, folder)) or env)
    args = short_args(mujoco, tmp_path, env_id="Hopper-v5", capture_video=True, iterations=1)
    mujoco.train(args)
    (run_dir,) = tmp_path.iterdir()
    ((env, folder),) = recorded
    assert env.render_mode == "rgb_array" and Path(folder).parent == run_dir / "videos"
    with pytest.raises(SystemExit):
        mujoco.train(short_args(mujoco, tmp_path / "refused", env_id="CartPole-v1", capture_video=True))
    assert len(recorded) == 1 and not (tmp_path / "refused").exists()


def test_warnings_of_the_simulator_are_said_once(mujoco, recwarn):
    """MuJoCo would print this one for each of the three environments."""
    make_envs(mujoco, "HalfCheetah-v5", 3).close()
    assert len([warning for warning in recwarn if "settotalmass" in str(warning.message)]) == 1


def test_policy_is_the_gaussian_of_torch_distributions(mujoco):
    torch.manual_seed(0)
    policy, obs = mujoco.Policy(obs_dim=5, action_dim=3), torch.randn(7, 5)
    policy.log_std.data = torch.tensor([-1.0, 0.0, 0.7])
    ours, truth = policy(obs, None), Independent(Normal(policy.net(obs), policy.log_std.exp()), 1)
    actions = truth.sample((4,))
    torch.testing.assert_close(ours.log_prob(actions), truth.log_prob(actions))
    torch.testing.assert_close(ours.entropy().expand(7), truth.entropy())
    torch.testing.assert_close(ours.mode, truth.mode)
    gradients, expected = (torch.autograd.grad(p.log_prob(actions).sum(), policy.parameters()) for p in (ours, truth))
    torch.testing.assert_close(gradients, expected)
    samples = torch.stack([ours.sample() for _ in range(20_000)])
    torch.testing.assert_close(samples.mean(0), truth.mean, atol=0.06, rtol=0)  # four standard errors of the widest
    torch.testing.assert_close(samples.std(0), truth.stddev, atol=0, rtol=0.02)
