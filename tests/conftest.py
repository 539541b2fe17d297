"""What the tests share: the scripts as modules, small agents, short runs, and spies."""

import functools
import importlib
import math
import os
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BDPG = ["bdpg_mujoco", "bdpg_atari"]
WGAN = ["ppo_wgan_mujoco", "ppo_wgan_atari"]
QR = ["ppo_qr_mujoco", "ppo_qr_atari"]
PPO = ["ppo_mujoco", "ppo_atari"]
SCRIPTS = BDPG + WGAN + QR + PPO
ATARI = [name for name in SCRIPTS if name.endswith("_atari")]
MUJOCO = [name for name in SCRIPTS if name.endswith("_mujoco")]
DISTRIBUTIONAL = BDPG + WGAN + QR
MAIN = "main"
# What the parameters are called that an optimiser may move.
OWN = {
    MAIN: ("policy.", "trunk.", "value.", "return_model.quantiles.", "return_model.generator."),
    "discriminator": ("return_model.discriminator.",),
    "encoder and prior": ("return_model.encoder.", "return_model.prior_mean."),
    "critic": ("return_model.critic.",),
}
torch.set_num_threads(1)  # bit-identical sums whatever the machine, and no fight for its cores
os.environ["OMP_NUM_THREADS"] = "1"  # the same for the programs that tests start
# Cut after 7 steps, so that a short run sees truncated episodes inside its rollouts.
gym.register("ShortPendulum-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=7)
gym.register("ShortHopper-v0", "gymnasium.envs.mujoco.hopper_v5:HopperEnv", max_episode_steps=18)


@pytest.fixture(params=SCRIPTS)
def script(request):
    """Every script; a test narrows it down with parametrize("script", ATARI, indirect=True)."""
    return importlib.import_module(request.param)


@pytest.fixture(params=BDPG)
def bdpg(request):
    return importlib.import_module(request.param)


@pytest.fixture
def shared():
    """One script for all: of functions that are identical in every script, one copy is tested."""
    return importlib.import_module("bdpg_mujoco")


@pytest.fixture
def mujoco():
    return importlib.import_module("bdpg_mujoco")


@pytest.fixture
def atari():
    return importlib.import_module("bdpg_atari")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def double_precision():
    """Runs are in single precision; formulas can be held to more digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def short_games(monkeypatch):
    """Atari games are cut after 60 frames, which is 15 steps."""
    change_games(monkeypatch, max_num_frames_per_episode=60)


@pytest.fixture
def lazy_disk(monkeypatch):
    """Checkpoints need not survive a power cut here, and flushing 25 MB to a busy disk can take minutes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a hardly trained run of each script."""
    folders = {}
    for name in SCRIPTS:
        script = importlib.import_module(name)
        runs = tmp_path_factory.mktemp(name)
        script.train(short_args(script, runs, iterations=2, **({} if is_atari(script) else {"env_id": "Hopper-v5"})))
        (folders[name],) = runs.iterdir()
    return folders


def change_games(monkeypatch, **options):
    """Makes Atari games with other options in every script."""
    for name in ATARI:
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "AtariVectorEnv", functools.partial(script.AtariVectorEnv, **options))


def is_atari(script):
    return script.__name__ in ATARI


def is_bdpg(script):
    return script.__name__ in BDPG


def make_agent(script, residuals=(1.0, -0.6), **overrides):
    """An untrained agent, its optimisers and arguments; the environments are only asked for their spaces. Returns are
    seen in units of 0.8: in units of 1 a forgotten unit would go unnoticed."""
    spaces = SimpleNamespace(
        observation_space=Box(-math.inf, math.inf, (3,)),
        action_space=Discrete(4) if is_atari(script) else Box(-1, 1, (2,)),
    )
    args = script.Args(cuda=False, **overrides)
    agent = script.Agent(spaces, args)
    if script.__name__ in BDPG + WGAN:
        agent.return_model.track_residuals(torch.as_tensor(residuals))
    return agent, script.make_optimizers(agent, args), args


def random_observations(script, n):
    """Observations as the trunk takes them."""
    return torch.randint(0, 256, (n, 84, 84, 4), dtype=torch.uint8) if is_atari(script) else torch.randn(n, 3)


def copy_of(agent):
    return {name: value.clone() for name, value in agent.state_dict().items()}


def moved_names(agent, before):
    return {name for name, value in agent.state_dict().items() if not torch.equal(value, before[name])}


def rollout(T, N, seed=0, dtype=torch.float64, p_end=0.15):
    """Random rewards and returns with both kinds of episode end; next_g is the shifted g but where an episode ended."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    coin = lambda: torch.rand(T, N, generator=generator) < p_end  # noqa: E731
    rewards, values, terminations, truncations = draw(T, N), draw(T + 1, N), coin(), coin()
    dones = terminations | truncations
    next_g = torch.where(dones, draw(T, N), values[1:])
    return rewards, values[:-1], next_g, terminations, dones


def n_step_target(rewards, next_g, terminations, dones, gamma, t, i, n):
    """r_t + γ r_{t+1} + ... + γ^m g(s_{t+m}), term by term: m = n, or fewer where episode or rollout end first."""
    total, discount = 0.0, 1.0
    for step in range(t, min(t + n, len(rewards))):
        total += discount * rewards[step, i].item()
        discount *= gamma
        if dones[step, i]:
            break
    return total + (0.0 if terminations[step, i] else discount * next_g[step, i].item())


def lambda_weights(gae_lambda, k):
    """GAE's weight of the n-step target for n = 1 ... k; a draw that ends earlier ends there for all longer n alike."""
    return np.array([(1 - gae_lambda) * gae_lambda ** (n - 1) for n in range(1, k)] + [gae_lambda ** (k - 1)])


def short_args(script, run_dir, **overrides):
    """Arguments of a run that takes a second or two, on tasks that pay rewards within their first steps."""
    tiny = dict(num_envs=2, num_steps=16, minibatch_size=16, update_epochs=2, cuda=False, seed=3)
    tiny |= {} if script.__name__ in PPO else dict(num_return_samples=1)
    tiny |= dict(eta=0.1) if is_bdpg(script) else {}
    tiny["env_id"] = "PhoenixNoFrameskip-v4" if is_atari(script) else "ShortPendulum-v0"
    iterations = overrides.pop("iterations", 3)
    tiny |= overrides
    steps = max(tiny["num_steps"], tiny.get("bootstrap_length") or 0)
    tiny.setdefault("total_timesteps", iterations * tiny["num_envs"] * steps)
    return script.Args(run_dir=str(run_dir), **tiny)


def frozen(script):
    """Overrides for short_args with which the networks are too slow to change in a run."""
    return {name: 1e-30 for name in vars(script.Args()) if name.endswith("learning_rate")}


def spy(monkeypatch, owner, name):
    """Lets owner.name work as before and returns the list of its calls: (positional arguments, result)."""
    original, calls = getattr(owner, name), []

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(owner, name, recorded)
    return calls


def read_scalars(run_dir):
    """Every scalar that the only run below run_dir logged: {tag: [(step, value), ...]}."""
    (folder,) = {path.parent for path in run_dir.rglob("events.out.tfevents.*")}
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def newest(folder):
    return max(folder.glob("checkpoint-*.pt"))
