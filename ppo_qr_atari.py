"""PPO with a quantile-regression return distribution (PPO+QR) for Atari games, in one file.

The baseline of the BDPG paper with a discrete return distribution: one layer on the state embedding gives the return's quantiles,
which quantile regression fits to the Bellman targets x; a sampled return is a quantile picked at random. All else is
bdpg_atari.py to the letter (`diff` them); it explores naively. Paper: Li & Faisal, "Bayesian Distributional Policy Gradients",
AAAI 2021; "Eq." and "line" in the comments refer to it and to its Algorithm 1. Metrics, details, departures from it and results:
docs/ppo_qr.md.

    python ppo_qr_atari.py --env-id SeaquestNoFrameskip-v4
    python ppo_qr_atari.py --env-id ALE/Breakout-v5 --total-timesteps 1000000
    tensorboard --logdir runs
"""

import ctypes
import difflib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, Optional

import ale_py  # Atari: the games
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv  # Atari: many of them at once
from torch.distributions import Categorical  # Atari: discrete actions
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # --- experiment ---
    env_id: str = "BreakoutNoFrameskip-v4"
    """the task"""
    total_timesteps: int = 10_000_000
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
    # Atari:
    clip_reward: bool = False
    """learn from the sign of each reward, not from the reward divided by the running std of the discounted return"""

    # --- PPO ---
    num_steps: int = 128
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
    learning_rate: float = 2.5e-4
    """Adam's step size for policy, trunk and generator"""
    anneal_lr: bool = True
    """decay every learning rate linearly to 0 over the run"""
    update_epochs: int = 4
    """passes over each rollout"""
    minibatch_size: int = 256
    """samples |B| per gradient step; must divide num_envs * num_steps"""
    norm_adv: bool = True
    """standardise the advantages of each minibatch"""
    clip_coef: float = 0.1
    """PPO's clip range ε of the probability ratio"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the return model's loss beside the policy's loss"""
    max_grad_norm: float = 0.5
    """gradient norm at which each optimiser's step is clipped"""
    score_interval: int = 80
    """training batches between two averaged scores (paper: 80 on Atari, 4 on MuJoCo)"""

    # --- QR ---
    num_quantiles: int = 64
    """quantiles N of the return, at the levels (i + 1/2) / N"""


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
        # QR:
        (args.num_quantiles >= 1, f"--num-quantiles must be at least 1, not {args.num_quantiles}."),
    ]
    for holds, message in rules:
        if not holds:
            fail(message)


# --- environments ---


# Atari:
ATARI_ID = re.compile(r"\w+NoFrameskip-v4|ALE/\w+-v5")


# Atari:
def make_envs(args, video_dir):
    gym.register_envs(ale_py)
    spec = gym.registry.get(args.env_id)
    if spec is None or (not ATARI_ID.fullmatch(args.env_id) and "game" in spec.kwargs):
        nearest = difflib.get_close_matches(args.env_id, filter(ATARI_ID.fullmatch, gym.registry), n=1, cutoff=0)[0]
        fail(f"there is no environment {args.env_id!r} of the kind XNoFrameskip-v4 or ALE/X-v5; did you mean {nearest}?")
    if not ATARI_ID.fullmatch(args.env_id):
        fail(f"{args.env_id} is not an Atari game, and this script is for those: bdpg_mujoco.py is for continuous control.")
    # DeepMind's preprocessing, in C++: 84x84 grey, 4 frames a step with the maximum of the last two, 4 frames stacked, up to 30
    # no-ops, FIRE at the start of a game. With life_loss_info a lost life terminates the learning episode and the game goes on
    # (episodic_life would restart the game).
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        args.num_envs,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],  # 0 for NoFrameskip-v4, 0.25 for v5
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        life_loss_info=True,
        reward_clipping=False,
    )
    envs.video_dir = video_dir if args.capture_video else None
    return envs


# Atari:
def reset_envs(envs, seed):
    obs, infos = envs.reset(seed=seed)
    envs.lives, envs.video_frames, envs.num_games = infos["lives"], [], 0
    return obs


# Atari:
def step_envs(envs, actions):
    """One step. Returns observations, rewards, terminations, truncations, last observations of ended episodes, episode ends."""
    obs, rewards, terminations, truncations, infos = envs.step(actions)
    # A lost life lowers the count; after the last one the count is already the next game's, which is not lower.
    game_over = truncations | (terminations & (infos["lives"] >= envs.lives))
    envs.lives = infos["lives"]
    if envs.video_dir is not None:
        record_video(envs, obs[0, -1], game_over[0])
    return obs, rewards, terminations, truncations, infos.get("final_obs"), game_over


# Atari:
def record_video(envs, frame, game_over):
    """Collects what the agent sees of the first environment in the games that gymnasium's RecordVideo would show, and writes it."""
    from gymnasium.utils.save_video import capped_cubic_video_schedule, save_video  # needs MoviePy, which only videos need

    if game_over:  # then the frame is the next game's first
        if envs.video_frames:
            frames = [frame.repeat(4, 0).repeat(4, 1)[..., None].repeat(3, -1) for frame in envs.video_frames]
            save_video(frames, str(envs.video_dir), fps=15, name_prefix="game", episode_index=envs.num_games)
        envs.num_games += 1
        envs.video_frames = []
    if capped_cubic_video_schedule(envs.num_games):
        envs.video_frames.append(frame.copy())  # a view would keep the frames of all environments


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


# Atari:
class Trunk(nn.Module):
    """State embedding c(s), shared by the policy and the return model: the Nature CNN on 4 stacked frames."""

    output_dim = 512

    def __init__(self):
        super().__init__()
        self.conv1 = layer_init(nn.Conv2d(4, 32, 8, stride=4))
        self.conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
        self.conv3 = layer_init(nn.Conv2d(64, 64, 3, stride=1))
        self.linear = layer_init(nn.Linear(7 * 7 * 64, self.output_dim))

    def forward(self, obs):
        h = obs.permute(0, 3, 1, 2).float()  # frames are kept (height, width, stack): the layout in which convolutions are fast
        h = F.conv2d(h, self.conv1.weight / 255, self.conv1.bias, stride=4).relu_()  # scales weights, not pixels
        h = F.relu_(self.conv2(h))
        h = F.relu_(self.conv3(h))
        return F.relu(self.linear(h.permute(0, 2, 3, 1).flatten(1)))


# Atari:
class Policy(nn.Module):
    """Categorical on the shared embedding."""

    def __init__(self, num_actions):
        super().__init__()
        self.logits = layer_init(nn.Linear(Trunk.output_dim, num_actions), std=0.01)

    def forward(self, obs, c):
        return Categorical(logits=self.logits(c), validate_args=False)


# QR:
class ReturnModel(nn.Module):
    """The distribution of returns given c(s): its quantiles at the levels (i + 1/2) / N."""

    def __init__(self, state_dim, num_quantiles):
        super().__init__()
        self.generator = layer_init(nn.Linear(state_dim, num_quantiles), std=1.0)

    def sample(self, c, num_samples):
        """Returns g, each a quantile picked at random (lines 6 and 8), as a tensor (num_samples, *states)."""
        quantiles = self.generator(c)
        picks = torch.randint(quantiles.shape[-1], (*c.shape[:-1], num_samples), device=c.device)
        return quantiles.gather(-1, picks).movedim(-1, 0)


class Agent(nn.Module):
    """All that is learnt, running statistics included."""

    def __init__(self, envs, args):
        super().__init__()
        # Atari:
        self.trunk = Trunk()
        self.policy = Policy(int(envs.single_action_space.n))

        self.reward_stats = RunningMeanStd()
        # QR:
        self.return_model = ReturnModel(self.trunk.output_dim, args.num_quantiles)

    # Atari:
    def observe(self, obs, learn=True):
        """Raw observations as the networks take them: bytes, (height, width, stack)."""
        return torch.as_tensor(obs, device=self.reward_stats.mean.device).permute(0, 2, 3, 1).contiguous()


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

    # Atari:
    with_policy, with_returns = [agent.policy, agent.trunk], [model.generator]

    return {
        # QR:
        "policy, trunk and generator": adam(group(with_policy + with_returns, args.learning_rate, (0.9, 0.999))),
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


# QR:
def quantile_loss(quantiles, x):
    """The pinball loss, least where output i is the quantile of x given s at the level (i + 1/2) / N; the mean over samples and
    quantiles times sqrt(N), with which the trunk feels the same pull whatever N is."""
    num_quantiles = quantiles.shape[-1]
    levels = (torch.arange(num_quantiles, device=x.device) + 0.5) / num_quantiles
    errors = x.unsqueeze(-1) - quantiles
    return num_quantiles**0.5 * torch.max(levels * errors, (levels - 1) * errors).mean()


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
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
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
    changed = [f"{name} was {then[name]}, now {now[name]}" for name in now if name not in free and now[name] != then[name]]
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
    device = torch.device("cuda" if args.cuda else "cpu")
    if platform.libc_ver()[0] == "glibc":  # keep freed memory, for the next minibatch needs it again
        for parameter, value in (-1, 2**31 - 1), (-4, 0):  # M_TRIM_THRESHOLD, M_MMAP_MAX
            ctypes.CDLL(None).mallopt(parameter, value)

    start = time.strftime("%Y%m%d-%H%M%S")  # with the process id, for runs that start in the same second
    run_dir = args.run_dir / f"{args.env_id.replace('/', '-')}__{Path(__file__).stem}__{args.seed}__{start}-{os.getpid()}"
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
            iterations_done, global_step, seconds_before = (checkpoint[key] for key in ("iteration", "global_step", "seconds"))
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
    embeddings = torch.zeros(per_step + (agent.trunk.output_dim,), device=device)  # Atari: of the trunk that the policy shares
    actions = torch.as_tensor(np.zeros(per_step + envs.single_action_space.shape, envs.single_action_space.dtype), device=device)
    raw_rewards = torch.zeros(per_step, device=device)
    terminations = torch.zeros(per_step, dtype=torch.bool, device=device)
    dones = torch.zeros(per_step, dtype=torch.bool, device=device)
    reward_sums = torch.zeros(args.num_envs, device=device)
    episode_returns, episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    start_time, last_line_time = time.time(), 0
    in_terminal = sys.stderr.isatty()
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit=" steps", unit_scale=True, disable=not in_terminal)

    for iteration in range(iterations_done + 1, num_iterations + 1):  # line 2
        fraction_left = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = fraction_left * group["initial_lr"]

        # --- rollout (lines 3-7) ---
        cut_short = []  # (step, environment, final observation) of truncated episodes
        for t in range(args.num_steps):
            with torch.no_grad():
                c = embeddings[t] = agent.trunk(next_obs)  # Atari: shared with the policy
                action = agent.policy(next_obs, c).sample()  # Atari: which looks at c
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
            # Atari:
            if args.clip_reward:
                rewards = raw_rewards.sign()

            # --- returns, advantages and Bellman targets (lines 6, 8-11) ---
            # The networks did not change during the rollout, so all it needs of them but the actions is computed here in one batch.
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
            advantages = k_step_gae(policy_rewards, samples.mean(0), next_samples.mean(0), *gae_args)  # lines 10 and 13

            some = torch.randperm(batch_size, device=device)[:256]
            some_c, some_x = embeddings.flatten(0, 1)[some], x.flatten()[some]
            metrics = distribution_metrics(model.sample(some_c, 64), some_x)

        # --- minibatch updates (lines 14-20) ---
        batch = [v.flatten(0, 1) for v in (obs, actions, log_probs, advantages, x)]
        history = []
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            minibatches = zip(*(v[order].split(args.minibatch_size) for v in batch), strict=True)
            for o, action, old_log_prob, advantage, x in minibatches:  # QR: without b(s)
                c = agent.trunk(o)  # the only trunk pass
                losses = {}
                # QR:
                return_loss = losses["generator"] = quantile_loss(model.generator(c), x)

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
        if not all(math.isfinite(metrics[f"losses/{name}"]) for name in history[0]):  # then name the loss that went first
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
    print(f"{global_step:,} steps in {minutes:.1f} min; score over the last {len(recent_scores)} episodes: {score}; run: {run_dir}")
    if STOP_SIGNALS and iteration < num_iterations:
        print(f"stopped early; to go on: {resume_command}")
        raise SystemExit(128 + STOP_SIGNALS[0])
    return agent  # line 21


if __name__ == "__main__":
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    train(parse_args())
