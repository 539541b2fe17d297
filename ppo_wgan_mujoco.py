"""PPO with a Wasserstein-GAN return distribution (PPO+WGAN) for continuous control, in one file.

The baseline of the BDPG paper that generates returns without inferring anything: a generator G(z, s) turns noise z ~ N(0, 1)
into a sampled return, and a critic f(x, s), whose slope in x is at most 1, measures the Wasserstein distance between samples and
Bellman targets x; the mean of the samples also learns by regression. All else is bdpg_mujoco.py to the letter (`diff` them); it
explores naively. Paper: Li & Faisal, "Bayesian Distributional Policy Gradients", AAAI 2021; "Eq." and "line" in the comments
refer to it and to its Algorithm 1. Metrics, details, departures from it and results: docs/ppo_wgan.md.

    python ppo_wgan_mujoco.py --env-id Hopper-v5
    python ppo_wgan_mujoco.py --env-id HalfCheetah-v5 --total-timesteps 300000
    tensorboard --logdir runs
"""

import contextlib  # MuJoCo: environments in other processes
import ctypes
import difflib
import importlib.util
import json
import math
import multiprocessing  # MuJoCo: likewise
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings  # MuJoCo: receives the simulator's
from collections import deque
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from multiprocessing.util import Finalize  # MuJoCo: likewise
from pathlib import Path
from typing import Literal, Optional

import gymnasium as gym
import mujoco  # MuJoCo: the simulator
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # --- experiment ---
    env_id: str = "Hopper-v5"
    """the task"""
    total_timesteps: int = 1_000_000
    """agent steps over all environments together"""
    seed: int = 1
    """seed of networks, sampling and environments; on a CPU, with the same number of threads, it gives the same run bit for bit"""
    cuda: bool = torch.cuda.is_available()
    """train on the GPU (on by default where there is one)"""
    run_dir: Path = Path("runs")
    """where the run's folder (TensorBoard log, arguments, versions, checkpoints, videos) is made"""
    save_every: int = 50
    """training batches between two checkpoints; the last one is always saved, and the newest three are kept"""
    resume: Optional[Path] = None
    """continue this run (its folder or one of its checkpoints); only its length, device, logging and videos may change"""
    track: bool = False
    """also log to Weights & Biases (needs `pip install wandb`)"""
    wandb_project: str = "bdpg"
    """the Weights & Biases project, with --track"""
    capture_video: bool = False
    """record episodes of the first environment into the run's folder, ever more rarely (0, 1, 8, 27, ... 1000, 2000, ...)"""

    # --- environment ---
    num_envs: int = 16
    """parallel environments N (paper: 16)"""

    # --- PPO ---
    num_steps: int = 256
    """rollout length per environment (paper: 128 on Atari, 256 on MuJoCo); raised to k if --bootstrap-length is larger"""
    bootstrap_length: Optional[int] = None
    """longest bootstrap k >= 1 of advantages and Bellman targets (default: the rollout length)"""
    gamma: float = 0.99
    """discount γ in (0, 1]"""
    gae_lambda: float = 0.95
    """λ in [0, 1] of generalised advantage estimation"""
    target: Literal["lambda", "sr"] = "lambda"
    """Bellman target x: "lambda" averages n-step targets (paper, GAE); "sr" draws one of them, which keeps the spread"""
    num_return_samples: int = 8
    """return samples M >= 1 averaged per state in the policy's advantage (x always uses a single one)"""
    learning_rate: float = 3e-4
    """Adam's step size for policy, trunk and generator"""
    anneal_lr: bool = True
    """decay every learning rate linearly to 0 over the run"""
    update_epochs: int = 10
    """passes over each rollout"""
    minibatch_size: int = 256
    """samples |B| per gradient step; must divide num_envs * num_steps"""
    norm_adv: bool = True
    """standardise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """PPO's clip range ε of the probability ratio"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the return model's loss beside the policy's loss"""
    max_grad_norm: float = 0.5
    """gradient norm at which each optimiser's step is clipped"""
    score_interval: int = 4
    """training batches between two averaged scores (paper: 80 on Atari, 4 on MuJoCo)"""

    # --- WGAN ---
    latent_dim: int = 2
    """dimension of the latent z"""
    critic_learning_rate: float = 1e-3
    """Adam's step size for the critic"""
    num_critic_steps: int = 1
    """critic steps per gradient step of policy and generator"""
    gradient_penalty: float = 10.0
    """weight of max(0, |df/dx| - 1)², which holds the critic's slope to at most 1"""
    mean_coef: float = 1.0
    """weight of the term that holds the mean of G to the mean of x; 0 leaves it to the critic alone, as in a plain WGAN"""


def fail(message):
    """One sentence on stderr and exit code 2: a user who is wrong never sees a traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    k = args.bootstrap_length
    steps = max(args.num_steps, k or 0)
    batch = args.num_envs * steps
    sizes = f"the batch of {args.num_envs} * {steps} = {batch} steps"
    rules = [
        (0 <= args.seed < 2**30, f"--seed must lie in [0, 2**30), not {args.seed}."),
        (args.num_envs >= 1, f"--num-envs must be at least 1, not {args.num_envs}."),
        (args.num_steps >= 1, f"--num-steps must be at least 1, not {args.num_steps}."),
        (k is None or k >= 1, f"--bootstrap-length must be at least 1, not {k}."),
        (args.minibatch_size >= 2, f"--minibatch-size must be at least 2, not {args.minibatch_size}."),
        (batch % max(args.minibatch_size, 1) == 0, f"--minibatch-size {args.minibatch_size} does not divide {sizes}."),
        (args.total_timesteps >= batch, f"--total-timesteps {args.total_timesteps} is less than {sizes}."),
        (args.update_epochs >= 1, f"--update-epochs must be at least 1, not {args.update_epochs}."),
        (args.save_every >= 1, f"--save-every must be at least 1, not {args.save_every}."),
        (args.score_interval >= 1, f"--score-interval must be at least 1, not {args.score_interval}."),
        (0 < args.gamma <= 1, f"--gamma must lie in (0, 1], not {args.gamma}."),
        (0 <= args.gae_lambda <= 1, f"--gae-lambda must lie in [0, 1], not {args.gae_lambda}."),
        (args.num_return_samples >= 1, f"--num-return-samples must be at least 1, not {args.num_return_samples}."),
        (args.learning_rate > 0, f"--learning-rate must be positive, not {args.learning_rate}."),
        (args.clip_coef > 0, f"--clip-coef must be positive, not {args.clip_coef}."),
        (args.ent_coef >= 0, f"--ent-coef must be at least 0, not {args.ent_coef}."),
        (args.vf_coef >= 0, f"--vf-coef must be at least 0, not {args.vf_coef}."),
        (args.max_grad_norm > 0, f"--max-grad-norm must be positive, not {args.max_grad_norm}."),
        (not args.cuda or torch.cuda.is_available(), "--cuda was asked for, but PyTorch finds no GPU; use --no-cuda."),
        (
            not args.capture_video or importlib.util.find_spec("moviepy"),
            "--capture-video needs MoviePy; install it with: pip install moviepy",
        ),
        # WGAN:
        (args.latent_dim >= 1, f"--latent-dim must be at least 1, not {args.latent_dim}."),
        (args.critic_learning_rate > 0, "--critic-learning-rate must be positive."),
        (args.num_critic_steps >= 1, f"--num-critic-steps must be at least 1, not {args.num_critic_steps}."),
        (args.gradient_penalty >= 0, f"--gradient-penalty must be at least 0, not {args.gradient_penalty}."),
        (args.mean_coef >= 0, f"--mean-coef must be at least 0, not {args.mean_coef}."),
    ]
    for holds, message in rules:
        if not holds:
            fail(message)


# --- environments ---


# MuJoCo:
class VectorEnv(gym.vector.SyncVectorEnv):
    """Environments in a row, without their infos, which nobody reads: to gather them takes a tenth of a step."""

    def _add_info(self, vector_infos, env_info, env_num):
        kept = {"final_obs": env_info["final_obs"]} if "final_obs" in env_info else {}
        return super()._add_info(vector_infos, kept, env_num)


# MuJoCo:
NUM_PROCESSES = torch.get_num_threads()  # for stepping environments: OMP_NUM_THREADS, or as many as there are cores


# MuJoCo:
class ParallelEnvs:
    """A row of environments for each process, the first for this one; to be used like gymnasium's vector environments."""

    def __init__(self, args):
        self.num_envs = args.num_envs
        self.rows = np.array_split(range(args.num_envs), min(args.num_envs, NUM_PROCESSES))
        self.row, self.pipes, self.processes = make_row(args, self.rows[0]), [], []
        self.envs = self.row.envs
        self.single_observation_space, self.single_action_space = (
            self.row.single_observation_space,
            self.row.single_action_space,
        )
        self.end_processes = Finalize(
            self, end_rows, (self.processes,), exitpriority=0
        )  # by close(), or else at the end
        for indices in self.rows[1:]:
            pipe, other_end = multiprocessing.Pipe()
            process = multiprocessing.Process(target=serve_row, args=(other_end, pipe, args, indices))
            process.start()
            other_end.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def call(self, name, arguments):
        """The results of row.name(**arguments) for each row and its arguments; all rows are at work at the same time."""
        for pipe, given in zip(self.pipes, arguments[1:], strict=True):
            pipe.send((name, given))
        own = getattr(self.row, name)(**arguments[0])
        try:
            return [own, *(pipe.recv() for pipe in self.pipes)]
        except (EOFError, ConnectionError):
            raise RuntimeError("a process that steps environments has ended; what it said is above") from None

    def reset(self, seed):
        results = self.call("reset", [{"seed": seed + int(indices[0])} for indices in self.rows])
        return np.concatenate([obs for obs, _ in results]), {}

    def step(self, actions):
        results = self.call("step", [{"actions": actions[indices]} for indices in self.rows])
        *outcome, infos = zip(*results, strict=True)
        final_obs = [
            info.get("final_obs", [None] * len(indices)) for info, indices in zip(infos, self.rows, strict=True)
        ]
        return *map(np.concatenate, outcome), {"final_obs": sum(map(list, final_obs), [])}

    def close(self):
        self.end_processes()
        self.row.close()


# MuJoCo:
def serve_row(pipe, other_end, args, indices):
    """The work of another process: does what the pipe says, as long as there is a main process."""
    other_end.close()  # held open here too, the pipe would outlive the main process
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C is for the main process
        signal.signal(number, signal.SIG_IGN)
    row = make_row(args, indices)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(row, name)(**arguments))


# MuJoCo:
def end_rows(processes):
    for process in processes:
        process.kill()
        process.join()


# MuJoCo:
def make_row(args, indices):
    mujoco.set_mju_user_warning(warnings.warn)  # which says a thing once, and not for every environment

    def make_env(index):
        if not (args.capture_video and index == 0):
            return gym.make(args.env_id, disable_env_checker=True)
        # gymnasium 1.4 leaves MuJoCo's camera where it is unless told to follow, and the agent runs out of the picture
        camera = {"camera_name": "track"} if "mujoco" in str(gym.spec(args.env_id).entry_point) else {}
        return gym.make(args.env_id, render_mode="rgb_array", disable_env_checker=True, **camera)

    return VectorEnv(
        [lambda index=index: make_env(index) for index in indices],
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,  # the default mode would insert a step that ignores the action
    )


# MuJoCo:
def make_envs(args, video_dir):
    if re.match(r"ALE/|.*NoFrameskip-v", args.env_id):
        fail(f"{args.env_id} is an Atari game, and this script is for continuous control: use bdpg_atari.py.")
    if args.capture_video and sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")

    try:
        envs = ParallelEnvs(args)
    except gym.error.UnregisteredEnv:
        nearest = difflib.get_close_matches(args.env_id, gym.registry, n=1, cutoff=0)[0]
        fail(f"there is no environment {args.env_id!r}; did you mean {nearest}?")
    except (gym.error.Error, ImportError) as error:
        fail(f"{args.env_id} cannot be made: {str(error).splitlines()[0]}")
    if isinstance(envs.single_action_space, gym.spaces.Discrete):
        fail(
            f"{args.env_id} has discrete actions, and this script is for continuous ones: bdpg_atari.py plays Atari games."
        )
    for space in (envs.single_action_space, envs.single_observation_space):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            fail(f"{args.env_id} has the space {space}, but this script needs vectors of real numbers.")
    if not envs.single_action_space.is_bounded():
        fail(f"{args.env_id} has unbounded actions, and this script needs bounds to scale them.")
    envs.video_dir = video_dir if args.capture_video else None
    if args.capture_video:
        try:  # now, not when the run has begun
            envs.envs[0].reset()
            envs.envs[0].render()
        except Exception as error:  # without OpenGL each backend fails in its own way
            reason = (str(error) or type(error).__name__).splitlines()[0]
            fail(f"{args.env_id} cannot be drawn here ({reason}); omit --capture-video.")
    return envs


# MuJoCo:
def reset_envs(envs, seed):
    if envs.video_dir is not None:
        envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], str(envs.video_dir), disable_logger=True)
    return envs.reset(seed=seed)[0]


# MuJoCo:
def step_envs(envs, actions):
    """One step. Returns observations, rewards, terminations, truncations, last observations of ended episodes, episode ends."""
    space = envs.single_action_space
    actions = space.low + (space.high - space.low) * (np.clip(actions, -1, 1) + 1) / 2  # the policy acts in [-1, 1]
    obs, rewards, terminations, truncations, infos = envs.step(actions)
    return obs, rewards, terminations, truncations, infos.get("final_obs"), terminations | truncations


# --- functions ---


class RunningMeanStd(nn.Module):
    """Mean and standard deviation of all that was seen, batch by batch; buffers, so that they are saved with the agent."""

    def __init__(self, shape=()):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, batch):
        var, mean = torch.var_mean(batch.double(), 0, correction=0)
        self.count += len(batch)
        share = len(batch) / self.count.item()
        self.var.lerp_(var + (1 - share) * (mean - self.mean).square(), share)
        self.mean.lerp_(mean, share)

    @property
    def std(self):
        return torch.sqrt(self.var + 1e-8)


def k_step_gae(rewards, g, next_g, terminations, dones, gamma, gae_lambda, k):
    """Advantages sum_{l<k} (γλ)^l δ_{t+l} with δ_t = r_t + γ g(s_{t+1}) - g_t, cut where episodes and the rollout end (line 10)."""
    deltas = rewards + gamma * next_g * ~terminations - g
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * gae_lambda * ~dones[t] * advantage
        advantages[t] = advantage
    if k < len(deltas):
        # A window of k steps is the whole sum less what follows the window, where no episode ended inside it.
        unbroken = count_in_window(dones, k) == 0
        advantages[:-k] = advantages[:-k] - (gamma * gae_lambda) ** k * unbroken * advantages[k:]
    return advantages


def sr_targets(rewards, next_g, terminations, dones, gamma, gae_lambda, k):
    """One n-step target per step, n drawn with GAE's weights: P(n) = (1-λ)λ^(n-1) for n < k, else k (SR(λ), Nam et al. 2021).

    k_step_gae + g averages these targets, which is right in the mean but too narrow; a draw has the spread of the return. At each
    step it is drawn whether to go on, and steps that do share what follows: each n has GAE's chance, but neighbours' are not
    independent."""
    one_step = rewards + gamma * next_g * ~terminations
    go_on = (torch.rand_like(rewards) < gae_lambda) & ~dones
    go_on[-1] = False
    x = one_step.clone()
    for t in reversed(range(len(x) - 1)):
        x[t] = torch.where(go_on[t], rewards[t] + gamma * x[t + 1], one_step[t])
    if k < len(x):
        # Where the draw went past k steps, bootstrap at step k instead.
        too_long = count_in_window(go_on, k) == k
        x[:-k] = x[:-k] - gamma**k * too_long * (x[k:] - next_g[k - 1 : -1])
    return x


def count_in_window(flags, k):
    """How many of flags[t], ..., flags[t+k-1] are set, for every t < T - k."""
    counts = F.pad(flags.long().cumsum(0), (0, 0, 1, 0))
    return counts[k:-1] - counts[: -k - 1]


def discounted_sums(rewards, dones, start, gamma):
    """The running discounted reward sum of each environment (its std is the scale of rewards), carried on from `start`."""
    sums = torch.empty_like(rewards)
    for t in range(len(rewards)):
        start = gamma * start + rewards[t]
        sums[t] = start
        start = start * ~dones[t]
    return sums, start


# --- networks ---


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


# WGAN:
class ConditionalMLP(nn.Module):
    """A network on a few scalars and a state embedding c. The scalars' weights start large, so that c does not drown them; both
    meet in a sum, so that many samples of one state share the work on c (c broadcasts)."""

    def __init__(self, input_dim, state_dim, output_dim, hidden):
        super().__init__()
        self.from_inputs = nn.Parameter(
            nn.init.orthogonal_(torch.empty(input_dim, hidden[0]), 3.0)
        )  # nn.Linear would be slower
        self.from_state = layer_init(nn.Linear(state_dim, hidden[0]), std=1.0)
        self.middle = layer_init(nn.Linear(hidden[0], hidden[1]))
        self.output = layer_init(nn.Linear(hidden[1], output_dim), std=1.0)

    def forward(self, inputs, c):
        h = F.leaky_relu(inputs @ self.from_inputs + self.from_state(c), 0.2)
        return self.output(F.leaky_relu(self.middle(h), 0.2))


# MuJoCo:
class Trunk(nn.Module):
    """State embedding c(s) of the return model; the policy has a network of its own."""

    output_dim = 64

    def __init__(self, obs_dim):
        super().__init__()
        width = self.output_dim
        self.net = nn.Sequential(
            layer_init(nn.Linear(obs_dim, width)), nn.Tanh(), layer_init(nn.Linear(width, width)), nn.Tanh()
        )

    def forward(self, obs):
        return self.net(obs)


# MuJoCo:
class DiagonalGaussian:
    """Actions with independent normal components; torch.distributions has it too, at four times the cost."""

    def __init__(self, mean, log_std):
        self.mode, self.log_std = mean, log_std

    @torch.no_grad()
    def sample(self):
        return self.mode + self.log_std.exp() * torch.randn_like(self.mode)

    def log_prob(self, action):
        standardised = (action - self.mode) / self.log_std.exp()
        return -0.5 * standardised.square().sum(-1) - (self.log_std + 0.5 * math.log(2 * math.pi)).sum()

    def entropy(self):
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


# MuJoCo:
class Policy(nn.Module):
    """Diagonal Gaussian with a state-independent standard deviation."""

    def __init__(self, obs_dim, action_dim, width=64):
        super().__init__()
        self.net = nn.Sequential(
            layer_init(nn.Linear(obs_dim, width)),
            nn.Tanh(),
            layer_init(nn.Linear(width, width)),
            nn.Tanh(),
            layer_init(nn.Linear(width, action_dim), std=0.01),
        )
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs, c):
        return DiagonalGaussian(self.net(obs), self.log_std)


# WGAN:
class ReturnModel(nn.Module):
    """The distribution of returns given c(s): generator G(z,s) of noise z, and a critic f(x,s) of what it generates."""

    def __init__(self, state_dim, latent_dim, hidden):
        super().__init__()
        self.latent_dim = latent_dim
        self.generator = ConditionalMLP(latent_dim, state_dim, 1, hidden)
        self.critic = ConditionalMLP(1, state_dim, 1, hidden)
        self.register_buffer("residual_scale", torch.tensor(math.nan))

    def generate(self, z, c):
        """G(z, s)."""
        return self.generator(z, c).squeeze(-1)

    def sample(self, c, num_samples):
        """Returns g = G(z, s) with z ~ N(0, 1) (lines 6 and 8), as a tensor (num_samples, *states)."""
        return self.generate(torch.randn(num_samples, *c.shape[:-1], self.latent_dim, device=c.device), c)

    def centre(self, c):
        """b(s) = G(0, s), the reference that is subtracted from returns; computed once per rollout."""
        return self.generate(torch.zeros(*c.shape[:-1], self.latent_dim, device=c.device), c)

    def relative(self, x, centre):
        """The critic sees a return relative to its state, (x - b(s)) / w: raw, its spread is lost beside b(s)."""
        return ((x - centre) / self.residual_scale).unsqueeze(-1)

    def track_residuals(self, residuals):
        """Moves w, a running mean of |x - b(s)|; the first batch sets it. (The mean square would follow a few outliers, and then
        the spread of most states would be too small to see.)"""
        scale = residuals.abs().mean()
        self.residual_scale.copy_(torch.where(self.residual_scale.isnan(), scale, self.residual_scale.lerp(scale, 0.5)))

    def criticise(self, relative_x, c):
        """f(x, s)."""
        return self.critic(relative_x, c).squeeze(-1)


class Agent(nn.Module):
    """All that is learnt, running statistics included."""

    def __init__(self, envs, args):
        super().__init__()
        # MuJoCo:
        obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.obs_stats = RunningMeanStd((obs_dim,))
        self.trunk = Trunk(obs_dim)
        self.policy = Policy(obs_dim, action_dim)
        hidden = (64, 64)  # WGAN: widths of its networks

        self.reward_stats = RunningMeanStd()
        # WGAN:
        self.return_model = ReturnModel(self.trunk.output_dim, args.latent_dim, hidden)

    # MuJoCo:
    def observe(self, obs, learn=True):
        """Raw observations as the networks take them: standardised by the running statistics, which learn from them first."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        if learn:
            self.obs_stats.update(obs)
        return ((obs - self.obs_stats.mean) / self.obs_stats.std).clamp(-10, 10).float()


def as_vector(networks):
    """One vector that the networks' parameters become parts of: to clip and step it costs far less than dozens of small tensors."""
    parameters = [parameter for network in networks for parameter in network.parameters()]
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    nn.utils.vector_to_parameters(vector, parameters)
    vector.parts = parameters
    return vector


def make_optimizers(agent, args):
    """An Adam for each loss; it moves its own networks and no others."""
    model = agent.return_model

    def group(networks, learning_rate, betas):
        return {"params": as_vector(networks), "lr": learning_rate, "initial_lr": learning_rate, "betas": betas}

    def adam(*groups):
        return torch.optim.Adam(groups, eps=1e-5, fused=True)

    # MuJoCo:
    with_policy, with_returns = [agent.policy], [agent.trunk, model.generator]

    return {
        # WGAN: the generator goes without momentum, with which it and the critic circle each other
        "policy, trunk and generator": adam(
            group(with_policy, args.learning_rate, (0.9, 0.999)), group(with_returns, args.learning_rate, (0.0, 0.99))
        ),
        "critic": adam(group([model.critic], args.critic_learning_rate, (0.0, 0.99))),
    }


# --- losses ---


def ppo_loss(log_prob, old_log_prob, advantages, args):
    """The clipped surrogate of the policy gradient (line 20), and how far the policy has moved."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()
        clip_fraction = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return loss, approx_kl, clip_fraction


# WGAN:
def critic_loss(model, x, x_tilde, centre, c, gradient_penalty):
    """E[f(x̃, s)] - E[f(x, s)] with a penalty on slopes above 1; and its negative without it, which estimates W1(x, x̃) / w.

    Smaller slopes are free: to turn from 1 to -1, as it must when G overtakes x in some states, a slope has to pass through 0."""
    real, fake = model.relative(x, centre), model.relative(x_tilde, centre)
    between = torch.lerp(real, fake, torch.rand_like(real)).requires_grad_()  # at the same state
    f_real, f_fake, f_between = model.criticise(torch.stack([real, fake, between]), c)
    (slopes,) = torch.autograd.grad(f_between.sum(), between, create_graph=True)
    distance = (f_real - f_fake).mean()
    return gradient_penalty * F.relu(slopes.abs() - 1).square().mean() - distance, distance


# WGAN:
def wgan_losses(model, x, centre, c, mean_coef):
    """-E[f(G(z, s), s)] in units of returns, and mean_coef · ||x - E G(z, s)||². Both train the trunk by way of the generator.

    The critic tells where x lies only if the embedding tells states apart, and what teaches that to an untrained embedding is the
    second term. A product of two samples' errors is the square of their mean's error on average, so it leaves the spread alone."""
    g, g_prime = model.sample(c, 2)
    criticism = model.criticise(model.relative(g, centre), c.detach())
    return -model.residual_scale * criticism.mean(), mean_coef * ((x - g) * (x - g_prime)).mean()


def descend(optimizer, loss, max_grad_norm):
    """One clipped step on the optimiser's own parameters: nothing else that the loss depends on is moved."""
    vectors = [vector for group in optimizer.param_groups for vector in group["params"]]
    parameters = [parameter for vector in vectors for parameter in vector.parts]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    gradient = torch.cat([part.flatten() for part in gradients])
    grad_norm = gradient.norm()
    gradient *= (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)  # clip_grad_norm_, at a third of its cost
    for vector, part in zip(vectors, gradient.split([len(vector) for vector in vectors]), strict=True):
        vector.grad = part
    optimizer.step()
    return grad_norm


def distribution_metrics(samples, x):
    """How well sampled returns (n, states) describe the Bellman targets x (states,) that came true, one per state."""
    mean = samples.mean(0)
    low, high = torch.quantile(samples, torch.tensor([0.1, 0.9], device=x.device), dim=0)
    # Each state has a single x, so W1 compares what all states share: the distribution around the model's mean.
    residuals, sampled_residuals = x - mean, samples - mean
    levels = (torch.arange(100, device=x.device) + 0.5) / 100
    w1 = (torch.quantile(residuals, levels) - torch.quantile(sampled_residuals.flatten(), levels)).abs().mean()
    return {
        "return_model/explained_variance": 1 - residuals.var() / x.var(),
        "return_model/coverage_80": ((low <= x) & (x <= high)).float().mean(),
        "return_model/w1": w1 / x.std(),
        "return_model/spread": samples.std(0).mean() / x.std(),
    }


# --- the run's folder ---


def start_run(args, run_dir, global_step):
    """Makes the run's folder, writes down what it takes to repeat the run, and opens its log at `global_step`."""
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()
    except FileNotFoundError:
        git = ""
    packages = ["torch", "numpy", "gymnasium", "mujoco", "ale-py"]
    versions = {package.name: package.version for package in distributions() if package.name in packages}
    record = {
        "script": Path(__file__).name,
        "command": shlex.join(["python", *sys.argv]),
        "args": plain_args(args),
        "versions": {"python": platform.python_version(), **versions},
        "git": git or None,
    }
    if args.track:
        try:
            import wandb
        except ImportError:
            fail("--track needs Weights & Biases; install it with: pip install wandb")
    try:
        run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
        (run_dir / "run.json").write_text(json.dumps(record, indent=2) + "\n")
        if args.track:  # before the log is opened, or it would not be seen
            settings = dict(project=args.wandb_project, name=run_dir.name, config=record["args"], dir=run_dir)
            try:
                wandb.init(**settings, sync_tensorboard=True)
            except wandb.Error as error:
                fail(f"Weights & Biases refuses the run ({str(error).splitlines()[0]}); try `wandb login`.")
        writer = SummaryWriter(run_dir, purge_step=global_step + 1)  # a resumed log goes on where the checkpoint was
    except OSError as error:
        fail(f"the run's folder {run_dir} cannot be written ({error.strerror}); choose another with --run-dir.")
    writer.add_text("run", f"```\n{json.dumps(record, indent=2)}\n```", global_step)
    return writer, record


def plain_args(args):
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(args).items()}


def save_checkpoint(run_dir, checkpoint):
    """Whole or not at all: written beside its place, brought to the disk, then renamed."""
    path = run_dir / f"checkpoint-{checkpoint['global_step']:012d}.pt"
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        fail(f"the checkpoint {path} cannot be written ({error}); those saved before it are whole.")
    for old in sorted(run_dir.glob("checkpoint-*.pt"))[:-3]:
        old.unlink()


def load_checkpoint(path):
    """The newest checkpoint of a run's folder, or the given one; and its path."""
    if path.is_dir():
        path = max(path.glob("checkpoint-*.pt"), default=path / "checkpoint-*.pt")
    if not path.is_file():
        fail(f"there is no checkpoint {path}.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = dict(checkpoint)["script"]
    except Exception as error:  # a damaged file can fail in many ways, all of which mean the same
        fail(f"{path} is not a readable checkpoint ({type(error).__name__}).")
    if script != Path(__file__).name:
        fail(f"{path} was made by {script}, not by {Path(__file__).name}.")
    return checkpoint, path


def check_same_run(args, saved):
    """Refuses to resume with arguments that would make it another run."""
    free = ("total_timesteps", "run_dir", "save_every", "resume", "cuda", "track", "wandb_project", "capture_video")
    now = plain_args(args)
    then = {name: saved.get(name, "not there") for name in now}
    changed = [
        f"{name} was {then[name]}, now {now[name]}" for name in now if name not in free and now[name] != then[name]
    ]
    if changed:
        fail(f"a resumed run keeps its arguments, but {'; '.join(changed)}.")


def parse_args():
    """The command line; with --resume, what it leaves out is as in the checkpoint."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume is None:
        return args
    checkpoint, path = load_checkpoint(args.resume)
    try:
        saved = Args(**checkpoint["args"] | {"run_dir": args.run_dir, "resume": args.resume})
    except (KeyError, TypeError) as error:
        fail(f"{path} does not fit this script ({error}).")
    return tyro.cli(Args, default=saved)


STOP_SIGNALS = []


def request_stop(number, frame):
    """A first Ctrl-C or SIGTERM lets the iteration end and saves; a second one stops at once."""
    STOP_SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)
    print("\nstopping after this iteration; once more to stop at once", file=sys.stderr)


# --- training ---


def train(args):
    check_args(args)
    k = args.bootstrap_length or args.num_steps
    args.num_steps = max(k, args.num_steps)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(1)  # MuJoCo: networks this small gain nothing from more
    device = torch.device("cuda" if args.cuda else "cpu")
    if platform.libc_ver()[0] == "glibc":  # keep freed memory, for the next minibatch needs it again
        for parameter, value in (-1, 2**31 - 1), (-4, 0):  # M_TRIM_THRESHOLD, M_MMAP_MAX
            ctypes.CDLL(None).mallopt(parameter, value)

    start = time.strftime("%Y%m%d-%H%M%S")  # with the process id, for runs that start in the same second
    run_dir = (
        args.run_dir / f"{args.env_id.replace('/', '-')}__{Path(__file__).stem}__{args.seed}__{start}-{os.getpid()}"
    )
    if args.resume is not None:
        checkpoint, path = load_checkpoint(args.resume)
        run_dir = path.parent
        check_same_run(args, checkpoint["args"])
    envs = make_envs(args, run_dir / "videos" / start)
    agent = Agent(envs, args).to(device)  # line 1
    model = agent.return_model
    optimizers = make_optimizers(agent, args)
    recent_scores, interval_scores = deque(maxlen=100), []
    iterations_done = global_step = seconds_before = 0
    if args.resume is not None:
        try:
            agent.load_state_dict(checkpoint["agent"])
            for name, optimizer in optimizers.items():
                optimizer.load_state_dict(checkpoint["optimizers"][name])
            recent_scores.extend(checkpoint["recent_scores"])
            interval_scores.extend(checkpoint["interval_scores"])
            iterations_done, global_step, seconds_before = (
                checkpoint[key] for key in ("iteration", "global_step", "seconds")
            )
            torch.set_rng_state(checkpoint["rng"])
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            fail(f"{path} does not fit this script ({str(error).splitlines()[0]}).")
        if iterations_done >= num_iterations:
            fail(f"this run is complete at {global_step} steps; to go on, give a larger --total-timesteps.")
    writer, record = start_run(args, run_dir, global_step)
    if args.resume is not None:  # training branches off here: later checkpoints are set aside
        for later in run_dir.glob("checkpoint-*.pt"):
            if later.stem >= path.stem and later != path:
                later.rename(later.with_suffix(f".abandoned-{start}"))
    resume_command = shlex.join(["python", sys.argv[0], "--resume", str(run_dir)])

    # Environment i gets env_seed + i: other episodes than with another --seed, and than before an interruption.
    env_seed = int(np.random.SeedSequence([args.seed, iterations_done]).generate_state(1)[0]) >> 2
    next_obs = agent.observe(reset_envs(envs, env_seed), learn=args.resume is None)
    per_step = (args.num_steps, args.num_envs)  # the outcome of step t is stored at index t
    obs = torch.zeros(per_step + next_obs.shape[1:], dtype=next_obs.dtype, device=device)
    actions = torch.as_tensor(
        np.zeros(per_step + envs.single_action_space.shape, envs.single_action_space.dtype), device=device
    )
    raw_rewards = torch.zeros(per_step, device=device)
    terminations = torch.zeros(per_step, dtype=torch.bool, device=device)
    dones = torch.zeros(per_step, dtype=torch.bool, device=device)
    reward_sums = torch.zeros(args.num_envs, device=device)
    episode_returns, episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    start_time, last_line_time = time.time(), 0
    in_terminal = sys.stderr.isatty()
    progress = tqdm(
        total=num_iterations * batch_size, initial=global_step, unit=" steps", unit_scale=True, disable=not in_terminal
    )

    for iteration in range(iterations_done + 1, num_iterations + 1):  # line 2
        fraction_left = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = fraction_left * group["initial_lr"]

        # --- rollout (lines 3-7) ---
        cut_short = []  # (step, environment, final observation) of truncated episodes
        for t in range(args.num_steps):
            with torch.no_grad():
                action = agent.policy(next_obs, None).sample()  # MuJoCo: it has a network of its own
            obs[t], actions[t] = next_obs, action
            raw_obs, reward, terminated, truncated, final_obs, game_over = step_envs(envs, action.cpu().numpy())
            next_obs = agent.observe(raw_obs)
            raw_rewards[t] = torch.as_tensor(reward)
            terminations[t] = torch.as_tensor(terminated)
            dones[t] = torch.as_tensor(terminated | truncated)
            cut_short += [(t, i, final_obs[i]) for i in np.flatnonzero(truncated & ~terminated)]
            episode_returns += reward
            episode_lengths += 1
            for i in np.flatnonzero(game_over):
                step = global_step + (t + 1) * args.num_envs
                writer.add_scalar("charts/episodic_return", episode_returns[i], step)
                writer.add_scalar("charts/episodic_length", episode_lengths[i], step)
                recent_scores.append(episode_returns[i])
                interval_scores.append(episode_returns[i])
                episode_returns[i] = episode_lengths[i] = 0
        global_step += batch_size

        with torch.no_grad():
            # Rewards are divided by the running std of their discounted sum: returns of every task then have the same scale.
            sums, reward_sums = discounted_sums(raw_rewards, dones, reward_sums, args.gamma)
            agent.reward_stats.update(sums.flatten())
            rewards = (raw_rewards / agent.reward_stats.std).clamp(-10, 10).float()

            # --- returns, advantages and Bellman targets (lines 6, 8-11) ---
            # The networks did not change during the rollout, so all it needs of them but the actions is computed here in one batch.
            embeddings = agent.trunk(obs)  # MuJoCo: of the return model alone
            log_probs = agent.policy(obs, embeddings).log_prob(actions)
            last_embedding = agent.trunk(next_obs)
            samples = model.sample(torch.cat([embeddings, last_embedding.unsqueeze(0)]), args.num_return_samples)
            samples, next_samples = samples[:, :-1], samples[:, 1:].clone()
            if cut_short:  # after a truncated step comes the last state of its own episode, not the first of the next
                steps, indices, final_obs = zip(*cut_short, strict=True)
                c = agent.trunk(agent.observe(np.stack(final_obs), learn=False))
                next_samples[:, steps, indices] = model.sample(c, args.num_return_samples)
            g, next_g = samples[0], next_samples[0]
            gae_args = (terminations, dones, args.gamma, args.gae_lambda, k)
            if args.target == "sr":
                x = sr_targets(rewards, next_g, *gae_args)  # line 11
            else:
                x = k_step_gae(rewards, g, next_g, *gae_args) + g  # lines 10-11

            # --- curiosity (BDPG: lines 12-13, Eqs. 13-14) ---
            policy_rewards = rewards
            # WGAN:
            centre = model.centre(embeddings)
            model.track_residuals(x - centre)

            advantages = k_step_gae(policy_rewards, samples.mean(0), next_samples.mean(0), *gae_args)  # lines 10 and 13

            some = torch.randperm(batch_size, device=device)[:256]
            some_c, some_x = embeddings.flatten(0, 1)[some], x.flatten()[some]
            metrics = distribution_metrics(model.sample(some_c, 64), some_x)
            # WGAN:
            metrics["return_model/residual_scale"] = model.residual_scale

        # --- minibatch updates (lines 14-20) ---
        batch = [v.flatten(0, 1) for v in (obs, actions, log_probs, advantages, x)]
        # WGAN:
        batch.append(centre.flatten())

        history = []
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            minibatches = zip(*(v[order].split(args.minibatch_size) for v in batch), strict=True)
            for o, action, old_log_prob, advantage, x, b in minibatches:  # WGAN: with b(s) of the rollout
                c = agent.trunk(o)  # the only trunk pass
                losses = {}
                # WGAN:
                s = c.detach()  # the state as the critic takes it, which never trains the trunk
                for _ in range(args.num_critic_steps):
                    with torch.no_grad():
                        x_tilde = model.sample(s, 1)[0]
                    losses["critic"], losses["critic_w1"] = critic_loss(model, x, x_tilde, b, s, args.gradient_penalty)
                    descend(optimizers["critic"], losses["critic"], args.max_grad_norm)
                losses["generator"], losses["mean_matching"] = wgan_losses(model, x, b, c, args.mean_coef)
                return_loss = losses["generator"] + losses["mean_matching"]

                policy = agent.policy(o, c)
                log_prob, entropy = policy.log_prob(action), policy.entropy().mean()
                losses["policy"], approx_kl, clip_fraction = ppo_loss(log_prob, old_log_prob, advantage, args)
                loss = losses["policy"] - args.ent_coef * entropy + args.vf_coef * return_loss
                descend(optimizers["policy, trunk and generator"], loss, args.max_grad_norm)  # lines 19-20
                losses |= {"entropy": entropy, "approx_kl": approx_kl, "clip_fraction": clip_fraction}
                history.append({name: value.detach() for name, value in losses.items()})

        # --- logging ---
        metrics |= {f"losses/{name}": torch.stack([losses[name] for losses in history]).mean() for name in history[0]}
        metrics["charts/learning_rate"] = fraction_left * args.learning_rate
        metrics["charts/reward_scale"] = agent.reward_stats.std
        seconds = time.time() - start_time
        speed = (iteration - iterations_done) * batch_size / seconds
        metrics["charts/steps_per_second"] = speed
        if iteration % args.score_interval == 0 and interval_scores:
            metrics["charts/averaged_score"] = np.mean(interval_scores)
            interval_scores = []
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), global_step)
        score = f"{np.mean(recent_scores):.1f}" if recent_scores else "none yet"
        progress.set_postfix(score=score, refresh=False)
        progress.update(batch_size)
        if not in_terminal and time.time() - last_line_time > 10:
            last_line_time = time.time()
            minutes_left = (num_iterations - iteration) * batch_size / speed / 60
            print(f"step {global_step:,}  score {score}  {speed:,.0f} steps/s  {minutes_left:.0f} min left", flush=True)

        # --- checkpoint ---
        broken = [name for name, parameter in agent.named_parameters() if not parameter.isfinite().all()]
        if not all(
            math.isfinite(metrics[f"losses/{name}"]) for name in history[0]
        ):  # then name the loss that went first
            broken = [f"losses/{name}" for losses in history for name, value in losses.items() if not value.isfinite()]
        if broken:
            writer.close()
            fail(
                f"{broken[0]} is not finite after iteration {iteration}; try lower learning rates, "
                f"or go on from the last good checkpoint, if any: {resume_command}"
            )
        if iteration % args.save_every == 0 or iteration == num_iterations or STOP_SIGNALS:
            checkpoint = record | {
                "agent": agent.state_dict(),
                "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
                "recent_scores": list(map(float, recent_scores)),
                "interval_scores": list(map(float, interval_scores)),
                "iteration": iteration,
                "global_step": global_step,
                "seconds": seconds_before + seconds,
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if args.cuda else [],
            }
            save_checkpoint(run_dir, checkpoint)
        if STOP_SIGNALS:
            break

    progress.close()
    envs.close()
    writer.close()
    minutes = (seconds_before + seconds) / 60
    print(
        f"{global_step:,} steps in {minutes:.1f} min; score over the last {len(recent_scores)} episodes: {score}; run: {run_dir}"
    )
    if STOP_SIGNALS and iteration < num_iterations:
        print(f"stopped early; to go on: {resume_command}")
        raise SystemExit(128 + STOP_SIGNALS[0])
    return agent  # line 21


if __name__ == "__main__":
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    train(parse_args())
