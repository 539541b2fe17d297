"""Bayesian Distributional Policy Gradients (BDPG) for continuous control, in one file.

PPO whose critic is a return distribution. A generator G(z, s) turns a latent z ~ p(z|s) into a sampled return, and an
encoder q(z|x, s) infers the latent of a Bellman target x. Encoder and prior learn against a discriminator D(x, z, s).
How far a target moves the posterior over z is an information gain, which can be paid as a curiosity reward.

Paper: Li & Faisal, "Bayesian Distributional Policy Gradients", AAAI 2021. "Eq." and "line" in comments refer to it and
its Algorithm 1. Usage, logged metrics, implementation details and differences from the paper: docs/bdpg.md.

    python bdpg_mujoco.py --env-id Hopper-v5
    python bdpg_mujoco.py --resume runs/NAME --total-timesteps 2000000
    tensorboard --logdir runs
"""

import fcntl
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, Optional

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends quietly
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep: faster beside other programs

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    # --- experiment ---
    env_id: str = "Hopper-v5"
    """the task"""
    total_timesteps: int = 1_000_000
    """agent steps over all environments together"""
    seed: int = 1
    """seed of networks, sampling and environments; on CPU, with equally many threads, runs repeat bit for bit"""
    cuda: bool = torch.cuda.is_available()
    """train on the GPU (on by default where there is one)"""
    run_dir: str = "runs"
    """where the run's folder (TensorBoard log, arguments, versions, checkpoints) is made"""
    save_every: int = 50
    """iterations between two checkpoints; the last iteration is always saved, and the newest three are kept"""
    resume: Optional[str] = None
    """go on with the run in this folder; its arguments stay, but for --total-timesteps and --cuda"""
    track: bool = False
    """also log to Weights & Biases (needs `pip install wandb`)"""

    # --- environment ---
    num_envs: int = 16
    """parallel environments N (paper: 16)"""
    envpool: bool = True
    """step the tasks that EnvPool has in its C++ threads; gymnasium steps all others, and all with --no-envpool"""

    # --- PPO ---
    num_steps: int = 64
    """rollout length per environment (paper: 128 on Atari, 256 on MuJoCo); raised to --bootstrap-length if less"""
    bootstrap_length: Optional[int] = None
    """longest bootstrap k >= 1 of advantages and Bellman targets (default: the rollout length)"""
    gamma: float = 0.99
    """discount γ in (0, 1]"""
    gae_lambda: float = 0.95
    """λ in [0, 1] of generalised advantage estimation"""
    target: Literal["lambda", "sr"] = "lambda"
    """Bellman target x: "lambda" averages n-step targets (paper); "sr" draws one of them, which keeps the spread"""
    learning_rate: float = 6e-4
    """Adam's step size for policy, trunk and critic"""
    anneal_lr: bool = True
    """decay every learning rate linearly to 0 over the run"""
    update_epochs: int = 10
    """passes over each rollout"""
    minibatch_size: int = 256
    """samples |B| per gradient step; must divide num_envs * num_steps"""
    norm_adv: bool = False
    """standardise the advantages of each minibatch, also where they are only noise"""
    clip_coef: float = 0.2
    """PPO's clip range ε of the probability ratio"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the critic's loss beside the policy's loss"""
    max_grad_norm: float = 10.0
    """gradient norm at which each optimiser's step is clipped"""
    log_std_init: float = -1.0
    """log standard deviation of the actions at the start; 0 is half the width of the action range"""

    # --- BDPG ---
    eta: float = 0.0
    """initial curiosity coefficient η >= 0 of η·sqrt(log t / t); 0 is the paper's "BDPG naive", without curiosity"""
    u_bar: float = 100.0
    """cap ū > 0 on the information gain of a step, in nats; inf for none"""
    latent_dim: int = 2
    """dimension of the latent z"""
    adversarial_learning_rate: float = 1e-3
    """Adam's step size for discriminator, encoder and prior"""
    adversarial_interval: int = 2
    """minibatches from one update of discriminator, encoder and prior to the next (paper: 1)"""
    num_return_samples: int = 32
    """return samples averaged per state in the policy's advantage (Algorithm 1: 1); x always uses a single one"""
    relative_returns: bool = True
    """encoder and discriminator see returns relative to the state, (x - b(s)) / w (paper: returns as they are)"""
    energy_coef: float = 4.0
    """weight of the energy distance between G over the prior and x, beside the paper's regression (paper: 0)"""
    r1_coef: float = 0.3
    """weight of the penalty on the discriminator's slope in (x, z) (paper: 0)"""
    encoder_std_min: float = 0.1
    """smallest standard deviation of q(z|x, s) (paper: 0); near 0 the information gain grows without limit"""


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    """Refuses in one sentence what cannot work. Integers are counts, from 1 on; floats are finite and not negative."""
    ranges = {"seed": (0, 2**30), "gamma": (0, 1), "gae_lambda": (0, 1), "num_envs": (1, 4096)}
    ranges["log_std_init"] = (-10, 10)  # MuJoCo: its own
    ranges["u_bar"] = (0, math.inf)  # BDPG: its own
    for name, value in vars(args).items():
        low, high = ranges.get(name, (1, 2**40) if type(value) is int else (0, 1e30))
        if type(value) in (int, float) and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} must lie between {low} and {high}, not be {str(value)[:20]}.")
    batch_size = args.num_envs * args.num_steps
    if args.minibatch_size < 2 or batch_size % args.minibatch_size:
        fail(f"--minibatch-size {args.minibatch_size} must be at least 2 and divide the rollout's {batch_size} steps.")
    if args.total_timesteps < batch_size:
        fail(f"--total-timesteps {args.total_timesteps} is less than the {batch_size} steps of one rollout.")
    if args.cuda and not torch.cuda.is_available():
        fail("--cuda was asked for, but PyTorch finds no GPU; use --no-cuda.")


# --- environments ---
class Environments:
    """Copies of the task, stepped together. An episode that ends is reset in the same step, so that none is wasted."""

    def __init__(self, args, seed, **render):
        self.env_id, self.seed, self.in_envpool = args.env_id, seed, False
        try:
            if args.envpool and not render:
                import envpool  # takes a second, so only where it is used

                self.in_envpool = args.env_id in envpool.list_all_envs()
            if self.in_envpool:
                threads = torch.get_num_threads() + 1  # while one waits for its turn, the others step
                self.envs = envpool.make_gymnasium(args.env_id, num_envs=args.num_envs, seed=seed, num_threads=threads)
            else:
                makers = [lambda: gym.make(args.env_id, disable_env_checker=True, **render)] * args.num_envs
                self.envs = gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        except Exception as error:  # a user's environment can raise anything
            fail(f"{args.env_id} cannot be made: {(str(error) or repr(error)).splitlines()[0]}")
        self.action_space, self.observation_space = self.envs.single_action_space, self.envs.single_observation_space
        spaces = (self.action_space, self.observation_space)
        vectors = all(isinstance(s, gym.spaces.Box) and len(s.shape) == 1 and s.dtype.kind == "f" for s in spaces)
        if not vectors or not self.action_space.is_bounded():
            fail(f"{args.env_id} has {spaces}; this script needs vectors of real numbers, and bounds for actions.")

    def reset(self):
        return (self.envs.reset() if self.in_envpool else self.envs.reset(seed=self.seed))[0]

    def step(self, actions):
        """Observations, rewards, terminations, truncations, observations before resets, and which episodes ended."""
        low, high = self.action_space.low, self.action_space.high
        actions = low + (high - low) * (np.clip(actions, -1, 1) + 1) / 2  # the policy acts in [-1, 1]
        obs, rewards, terminations, truncations, infos = self.envs.step(actions.astype(low.dtype))
        ended, final_obs = terminations | truncations, obs.copy()
        if ended.any() and self.in_envpool:
            obs[ended] = self.envs.reset(np.flatnonzero(ended))[0]
        elif ended.any():
            final_obs[ended] = np.stack(infos["final_obs"][ended])
        if not np.isfinite(final_obs.sum() + obs.sum() + rewards.sum()):
            fail(f"{self.env_id} returned an observation or a reward that is not finite.")
        return obs, rewards, terminations, truncations, final_obs, ended


# --- running statistics, advantages and Bellman targets ---
class RunningMeanStd(nn.Module):  # of all that was seen; buffers, so that they are saved with the agent
    def __init__(self, shape=()):
        super().__init__()
        for name, value in (("mean", 0.0), ("var", 1.0), ("std", 1.0)):
            self.register_buffer(name, torch.full(shape, value, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, batch):
        var, mean = torch.var_mean(batch.double(), 0, correction=0)
        self.count += len(batch)
        weight = len(batch) / self.count.item()
        self.var.lerp_(var + (1 - weight) * (mean - self.mean).square(), weight)
        self.mean.lerp_(mean, weight)
        self.std = torch.sqrt(self.var + 1e-8)


def k_step_gae(rewards, g, next_g, terminations, dones, gamma, gae_lambda, k):
    """Advantages Σ_{l<k} (γλ)^l δ_{t+l} with δ_t = r_t + γ g(s_{t+1}) - g(s_t), cut at episode ends (line 10)."""
    deltas = rewards + gamma * next_g * ~terminations - g
    advantages, advantage = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * gae_lambda * ~dones[t] * advantage
        advantages[t] = advantage
    if k < len(deltas):  # k steps are the whole sum less what follows them, where no episode ended within
        unbroken = count_in_window(dones, k) == 0
        advantages[:-k] = advantages[:-k] - (gamma * gae_lambda) ** k * unbroken * advantages[k:]
    return advantages


def sr_targets(rewards, next_g, terminations, dones, gamma, gae_lambda, k):
    """One n-step target per step, n <= k drawn with GAE's weights (1-λ)λ^(n-1) (SR(λ), Nam et al. 2021). Their mean is
    k_step_gae + g, the spread of which is therefore too small. Steps that go on share what follows them."""
    one_step = rewards + gamma * next_g * ~terminations
    go_on = (torch.rand_like(rewards) < gae_lambda) & ~dones
    go_on[-1] = False
    x = one_step.clone()
    for t in reversed(range(len(x) - 1)):
        x[t] = torch.where(go_on[t], rewards[t] + gamma * x[t + 1], one_step[t])
    if k < len(x):  # where the draw went past k steps, bootstrap at step k instead
        too_long = count_in_window(go_on, k) == k
        x[:-k] = x[:-k] - gamma**k * too_long * (x[k:] - next_g[k - 1 : -1])
    return x


def count_in_window(flags, k):
    """How many of flags[t], ..., flags[t+k-1] are set, for every t < T - k."""
    counts = F.pad(flags.long().cumsum(0), (0, 0, 1, 0))
    return counts[k:-1] - counts[: -k - 1]


# --- networks ---
def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def tanh_mlp(*sizes, std=2**0.5):
    layers = [layer_init(nn.Linear(*pair), std) for pair in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


class Policy(nn.Module):
    """Diagonal Gaussian with a state-independent standard deviation."""

    def __init__(self, obs_dim, action_dim, log_std_init):
        super().__init__()
        self.mean = nn.Sequential(tanh_mlp(obs_dim, 64, 64), layer_init(nn.Linear(64, action_dim), std=0.01))
        self.log_std = nn.Parameter(torch.full((action_dim,), log_std_init))

    def forward(self, obs, c):
        return Independent(Normal(self.mean(obs), self.log_std.exp(), validate_args=False), 1, validate_args=False)


class ConditionalMLP(nn.Module):
    """A network on a few scalars and a state embedding c. Many samples of one state share the work on c."""

    def __init__(self, input_dim, state_dim, output_dim, hidden):
        super().__init__()
        self.from_inputs = nn.Linear(input_dim, hidden[0], bias=False)
        nn.init.orthogonal_(self.from_inputs.weight, 3.0)  # large, or c would drown the scalars
        self.from_state = layer_init(nn.Linear(state_dim, hidden[0]), std=1.0)
        self.middle = layer_init(nn.Linear(hidden[0], hidden[1]))
        self.output = layer_init(nn.Linear(hidden[1], output_dim), std=1.0)

    def forward(self, inputs, c):
        h = F.leaky_relu(self.from_inputs(inputs) + self.from_state(c), 0.2)
        return self.output(F.leaky_relu(self.middle(h), 0.2))


class ReturnModel(nn.Module):
    """The return distribution given c(s): prior p(z|s), encoder q(z|x,s), generator G(z,s), discriminator D(x,z,s)."""

    def __init__(self, state_dim, hidden, args):
        super().__init__()
        self.relative_returns, self.encoder_std_min = args.relative_returns, args.encoder_std_min
        self.prior_mean = nn.Sequential(tanh_mlp(state_dim, hidden[1]), tanh_mlp(hidden[1], args.latent_dim, std=0.1))
        self.encoder = ConditionalMLP(1, state_dim, 2 * args.latent_dim, hidden)
        self.generator = ConditionalMLP(args.latent_dim, state_dim, 1, hidden)
        self.discriminator = ConditionalMLP(1 + args.latent_dim, state_dim, 1, hidden)
        self.register_buffer("residual_scale", torch.tensor(math.nan if args.relative_returns else 1.0))

    def prior(self, c):
        """p(z|s) = N(mean(s), 1), the mean in [-1, 1]: an unbounded one drifts, and the information gain with it."""
        return Normal(self.prior_mean(c), 1.0, validate_args=False)

    def generate(self, z, c):
        return self.generator(z, c).squeeze(-1)

    def sample(self, c, num_samples):
        """Returns g = G(z, s) with z ~ p(z|s) (lines 6 and 8), as a tensor (num_samples, *states)."""
        return self.generate(self.prior(c).sample((num_samples,)), c)

    def centre(self, c):
        """b(s) = G(E[z|s], s), which is subtracted from the returns of a state; computed once per rollout."""
        return self.generate(self.prior_mean(c), c) if self.relative_returns else torch.zeros_like(c[..., 0])

    def relative(self, x, b):
        """(x - b(s)) / w, as encoder and discriminator see a return: its spread would be lost beside b(s)."""
        return ((x - b) / self.residual_scale).unsqueeze(-1)

    def track_residuals(self, residuals):
        """Moves w, a running mean of |x - b(s)|, which the first batch sets; the mean square would follow outliers."""
        scale, w = residuals.abs().mean(), self.residual_scale
        if self.relative_returns:
            w.copy_(torch.where(w.isnan(), scale, w.lerp(scale, 0.5)))

    def encode(self, x, b, c):
        mean, raw_std = self.encoder(self.relative(x, b), c).chunk(2, -1)
        return Normal(mean, F.softplus(raw_std) + self.encoder_std_min, validate_args=False)


class Agent(nn.Module):  # all that is learnt, running statistics included
    def __init__(self, envs, args):
        super().__init__()
        # MuJoCo: the policy has a network of its own, and the trunk c(s) is the critic's alone
        obs_dim, action_dim, state_dim = envs.observation_space.shape[0], envs.action_space.shape[0], 64
        self.obs_stats = RunningMeanStd((obs_dim,))
        self.trunk = tanh_mlp(obs_dim, 64, state_dim)
        self.policy = Policy(obs_dim, action_dim, args.log_std_init)

        self.reward_stats = RunningMeanStd()
        # BDPG:
        self.return_model = ReturnModel(state_dim, (64, 32), args)  # MuJoCo: the layers' widths
        self.u_stats = RunningMeanStd()

    def observe(self, obs):
        """Observations as the networks take them: standardised by the statistics of all rollouts before."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        return ((obs - self.obs_stats.mean) / self.obs_stats.std).clamp(-10, 10).float()


# --- losses and optimisers ---
def ppo_loss(log_prob, old_log_prob, advantages, args):
    """The clipped surrogate of the policy gradient (line 20), and how far the policy has moved."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantages).mean()
    movement = {"approx_kl": (ratio - 1 - log_ratio).detach().mean()}
    movement["clip_fraction"] = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return loss, movement


def energy_distance(g, x_tilde, x):
    """2 E|g - x| - E|g - g'| - E|x - x'| without its last part, which G does not change: least where samples g, g' over
    the prior have the distribution of x. x̃ serves as g'; as no gradient passes through it, that of g counts twice."""
    return 2 * (g - x).abs().mean() - 2 * (g - x_tilde.detach()).abs().mean()


def make_optimizers(agent, args):
    """One Adam for each adversary, and a main one for all other parameters: a layer that a fork adds is trained."""

    def adam(parameters, learning_rate, betas=(0.9, 0.999)):
        group = {"params": parameters, "lr": learning_rate, "initial_lr": learning_rate}
        return torch.optim.Adam([group], betas=betas, eps=1e-5, fused=True)

    # BDPG:
    discriminator = list(agent.return_model.discriminator.parameters())
    encoder_prior = [*agent.return_model.encoder.parameters(), *agent.return_model.prior_mean.parameters()]
    return {
        "main": adam([p for p in agent.parameters() if p not in {*discriminator, *encoder_prior}], args.learning_rate),
        "discriminator": adam(discriminator, args.adversarial_learning_rate, (0.0, 0.99)),
        "encoder and prior": adam(encoder_prior, args.adversarial_learning_rate, (0.0, 0.99)),
    }


def descend(optimizer, loss, max_grad_norm):
    """One clipped step on the optimiser's own parameters: nothing else that the loss depends on is moved."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.zero_grad()
    loss.backward(inputs=parameters)
    grad_norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
    return grad_norm


# --- the run's folder ---
def start_run(args, run_dir):
    """Makes the run's folder, locks it until the process ends, and writes down what it takes to repeat the run."""
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    record = {"script": Path(__file__).name, "command": shlex.join(["python", *sys.argv]), "git": git.stdout.strip()}
    record |= {"args": vars(args), "python": sys.version, "versions": {p.name: p.version for p in distributions()}}
    run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    fcntl.flock(lock := open(run_dir / "lock", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    (run_dir / "run.json").write_text(json.dumps(record, indent=2).replace(": Infinity", ": 1e999") + "\n")
    if args.track:
        import wandb

        wandb.init(project="bdpg", name=run_dir.name, config=record["args"], dir=run_dir, sync_tensorboard=True)
    return record, lock


def save_checkpoint(run_dir, checkpoint):
    """Atomic: written beside its place, flushed to the disk, then renamed. The newest three are kept."""
    path = run_dir / f"checkpoint-{checkpoint['global_step']:012d}.pt"
    temporary = path.with_suffix(".tmp")
    torch.save(checkpoint, buffer := io.BytesIO())
    try:
        temporary.write_bytes(buffer.getbuffer())
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    for old in sorted(run_dir.glob("checkpoint-*.pt"))[:-3]:
        old.unlink()


def load_checkpoint(path):
    """The newest checkpoint of a run's folder, or the given one, if it is intact and fits this script."""
    try:
        path = max(Path(path).glob("checkpoint-*.pt"), default=Path(path))
        if zipfile.ZipFile(path).testzip() is not None:
            raise ValueError("a checksum is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        iteration, numbers = checkpoint["iteration"], checkpoint["recent_scores"] + [checkpoint["seconds"]]
        if type(iteration) is not int or iteration < 1 or not np.isfinite(numbers).all():
            raise ValueError("a counter is wrong")
        for name, value in checkpoint["agent"].items():
            if not value.isfinite().all() or (name.endswith((".var", ".std", ".count", "_scale")) and value.min() < 0):
                raise ValueError(f"{name} cannot be {value.min()}")
        return checkpoint | {"args": Args(**checkpoint["args"])}
    except Exception as error:  # a damaged file can fail in many ways
        fail(f"{path} is no intact checkpoint of this {Path(__file__).name} ({repr(error).splitlines()[0]}).")


STOP_SIGNALS = []


def request_stop(number, frame):
    """The first signal lets the iteration end and saves; the same one again ends the run at once."""
    STOP_SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)


def say(text):
    """Prints, and goes on where nobody reads any more: neither `| head` nor a full disk may end a run here."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


# --- training ---
def train(args):
    k = args.bootstrap_length or args.num_steps
    args.num_steps = max(k, args.num_steps)
    check_args(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    start = load_checkpoint(args.resume) if args.resume else {"iteration": 0, "seconds": 0.0, "recent_scores": []}
    if start["iteration"] >= num_iterations:
        fail("this run is complete; to go on, give a larger --total-timesteps.")
    seed = int(np.random.SeedSequence([args.seed, start["iteration"]]).generate_state(1)[0]) >> 2
    torch.manual_seed(seed)  # neither another --seed nor a resumed run repeats samples or episodes
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = Environments(args, seed)
    torch.set_num_threads(1)  # MuJoCo: networks this small gain nothing from more
    agent = Agent(envs, args).to(device)  # line 1
    model = agent.return_model  # BDPG:
    optimizers = make_optimizers(agent, args)
    try:
        agent.load_state_dict(start.get("agent", agent.state_dict()))
        for name, optimizer in optimizers.items() if args.resume else ():
            optimizer.load_state_dict(optimizer.state_dict() | {"state": start["optimizers"][name]})
            for parameter, state in optimizer.state.items():
                if [v.shape for v in state.values() if v.is_contiguous()] != [(), parameter.shape, parameter.shape]:
                    raise ValueError(f"the {name} optimiser has other shapes")
    except Exception as error:
        fail(f"{args.resume} does not fit this script ({repr(error).splitlines()[0]}).")
    name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(args.resume or f"{args.run_dir}/{re.sub('[/:]', '-', name)}")
    record, lock = start_run(args, run_dir)
    global_step = start["iteration"] * batch_size
    writer = SummaryWriter(run_dir, purge_step=global_step + 1)  # a resumed log goes on where the checkpoint was

    next_obs, reward_sum = agent.observe(envs.reset()), np.zeros(args.num_envs)
    obs = next_obs.new_empty(args.num_steps, *next_obs.shape)  # made once: at Atari's size, new memory takes time
    episode_returns, recent_scores, start_time = np.zeros(args.num_envs), start["recent_scores"], time.time()

    for iteration in range(start["iteration"] + 1, num_iterations + 1):  # line 2
        fraction_left = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1
        for group in (group for optimizer in optimizers.values() for group in optimizer.param_groups):
            group["lr"] = fraction_left * group["initial_lr"]

        # --- rollout (lines 3-5 and 7) ---
        rollout, cut_short = [], []  # cut_short: (step, environment, last observation) of truncated episodes
        seen = []  # MuJoCo: raw observations, to standardise those of later rollouts by
        for t in range(args.num_steps):
            with torch.no_grad():
                action = agent.policy(next_obs, None).sample()  # MuJoCo: without c(s)
            raw_obs, reward, terminated, truncated, last_obs, ended = envs.step(action.cpu().numpy())
            seen.append(raw_obs)  # MuJoCo:
            reward_sum = args.gamma * reward_sum + reward
            obs[t] = next_obs
            rollout.append((action, *map(torch.tensor, (reward, terminated, truncated, reward_sum))))
            next_obs, reward_sum = agent.observe(raw_obs), reward_sum * ~(terminated | truncated)
            cut_short += [(t, i, last_obs[i]) for i in np.flatnonzero(truncated & ~terminated)]
            global_step += args.num_envs
            episode_returns += reward
            for i in np.flatnonzero(ended):
                writer.add_scalar("charts/episodic_return", episode_returns[i], global_step)
                recent_scores.append(float(episode_returns[i]))
                episode_returns[i] = 0

        # --- returns, advantages and Bellman targets (lines 6, 8-11) ---
        # The networks stay fixed during a rollout, so all but its actions is computed here, for all steps at once.
        rollout = (torch.stack(values).to(device) for values in zip(*rollout, strict=True))
        actions, raw_rewards, terminations, truncations, reward_sums = rollout
        with torch.no_grad():
            agent.reward_stats.update(reward_sums.flatten())
            rewards = (raw_rewards / agent.reward_stats.std).clamp(-10, 10).float()  # returns of about unit scale
            embeddings = agent.trunk(obs)  # MuJoCo: the policy does without
            log_probs = agent.policy(obs, embeddings).log_prob(actions)
            if cut_short:  # a truncated step is followed by its own episode's last state, not by the next one's first
                steps, indices, last_obs = zip(*cut_short, strict=True)
                last_embeddings = agent.trunk(agent.observe(np.stack(last_obs)))
            agent.obs_stats.update(torch.tensor(np.concatenate(seen), device=device))  # MuJoCo:
            gae = (terminations, terminations | truncations, args.gamma, args.gae_lambda, k)
            # BDPG: returns and targets
            samples = model.sample(torch.cat([embeddings, agent.trunk(next_obs)[None]]), args.num_return_samples)
            samples, next_samples = samples[:, :-1], samples[:, 1:].clone()
            if cut_short:
                next_samples[:, steps, indices] = model.sample(last_embeddings, args.num_return_samples)
            g, next_g = samples[0], next_samples[0]
            x_lambda = k_step_gae(rewards, g, next_g, *gae) + g  # lines 10-11
            x = sr_targets(rewards, next_g, *gae) if args.target == "sr" else x_lambda
            b = model.centre(embeddings)
            model.track_residuals(x - b)

            # BDPG: is the return model healthy?
            some_x, returns = x[::16], model.sample(embeddings[::16], 64)
            low, high = returns.quantile(torch.tensor([0.1, 0.9], device=device), dim=0)
            metrics = {"return_model/explained_variance": 1 - (some_x - returns.mean(0)).var() / some_x.var()}
            metrics["return_model/coverage_80"] = ((low <= some_x) & (some_x <= high)).float().mean()
            metrics["return_model/residual_scale"] = model.residual_scale
            metrics["return_model/prior_mean_abs"] = model.prior_mean(embeddings[::16]).abs().mean()
            metrics["return_model/encoder_std_min"] = model.encode(some_x, b[::16], embeddings[::16]).stddev.min()

            # BDPG: curiosity (lines 12-13), from the λ-target in any case: an sr target is too noisy for it
            policy_rewards = rewards
            if args.eta > 0:
                q_x, q_g = model.encode(x_lambda, b, embeddings), model.encode(g, b, embeddings)
                u = kl_divergence(q_x, q_g).sum(-1).clamp(max=args.u_bar)  # Eq. 13
                passes = max(4, iteration * args.update_epochs)  # the paper's t, from where log t / t falls
                eta_t = args.eta * math.sqrt(math.log(passes) / passes)
                if iteration > 1:  # gains are measured against earlier ones, of which the first batch has none
                    policy_rewards = rewards + eta_t * ((u - agent.u_stats.mean) / agent.u_stats.std).float()  # Eq. 14
                agent.u_stats.update(u.flatten())
                metrics |= {"curiosity/information_gain": u.mean(), "curiosity/information_gain_p99": u.quantile(0.99)}
            advantages = k_step_gae(policy_rewards, samples.mean(0), next_samples.mean(0), *gae)  # lines 10 and 13

        # --- minibatch updates (lines 14-20) ---
        batch = [values.flatten(0, 1) for values in (obs, actions, log_probs, advantages, x)]
        history = []
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size, device=device).split(args.minibatch_size):
                mb_obs, mb_actions, mb_log_probs, mb_advantages, mb_x = (v.index_select(0, rows) for v in batch)
                c = agent.trunk(mb_obs)  # the only trunk pass
                # BDPG: a sample of each joint distribution of Eq. 10 (lines 15-16)
                s, mb_b = c.detach(), b.flatten()[rows]  # the adversaries do not train the trunk
                z_tilde = model.encode(mb_x, mb_b, s).rsample()  # line 15
                z, z_new = model.prior(s).rsample((2,))  # line 16; z_new is for the energy distance
                x_tilde = model.generate(z, s)
                x_pair, z_pair = torch.stack([x_tilde, mb_x]), torch.stack([z, z_tilde])  # generated, inferred
                joints = torch.cat([model.relative(x_pair, mb_b), z_pair], -1)

                # BDPG: discriminator (line 17, Eq. 11)
                if len(history) % args.adversarial_interval == 0:
                    inputs = joints.detach().requires_grad_()
                    D_generated, D_inferred = logits = model.discriminator(inputs, s).squeeze(-1)
                    accuracy = torch.stack([D_generated > 0, D_inferred < 0]).float().mean()
                    discriminator_loss = -(F.logsigmoid(D_generated) + F.logsigmoid(-D_inferred)).mean()
                    slope_penalty = 0.0  # without one D wins or gives up, and encoder and prior learn little from it
                    if args.r1_coef > 0 and len(history) % (4 * args.adversarial_interval) == 0:  # cheaper than always
                        (slopes,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
                        slope_penalty = 4 * args.r1_coef * slopes.square().sum(-1).mean()
                    descend(optimizers["discriminator"], discriminator_loss + slope_penalty, args.max_grad_norm)

                    # BDPG: encoder and prior (line 18), by the same loss with the labels swapped
                    D_generated, D_inferred = model.discriminator(joints, s).squeeze(-1)
                    inference_loss = -(F.logsigmoid(-D_generated) + F.logsigmoid(D_inferred)).mean()
                    q_norm = descend(optimizers["encoder and prior"], inference_loss, args.max_grad_norm)

                # BDPG: generator (line 19, Eq. 12), and the energy distance
                reconstruction, g_new = model.generate(torch.stack([z_tilde, z_new]).detach(), c)
                generator_loss = F.mse_loss(reconstruction, mb_x)
                energy = model.residual_scale * energy_distance(g_new, x_tilde, mb_x)  # times w: in units of x²
                return_loss = generator_loss + args.energy_coef * energy
                losses = {"discriminator": discriminator_loss, "discriminator_accuracy": accuracy, "energy": energy}
                losses |= {"generator": generator_loss, "encoder_prior": inference_loss, "encoder_grad_norm": q_norm}

                policy = agent.policy(mb_obs, c)
                log_prob, entropy = policy.log_prob(mb_actions), policy.entropy().mean()
                policy_loss, movement = ppo_loss(log_prob, mb_log_probs, mb_advantages, args)  # line 20
                loss = policy_loss - args.ent_coef * entropy + args.vf_coef * return_loss
                grad_norm = descend(optimizers["main"], loss, args.max_grad_norm)
                losses |= {"policy": policy_loss, "entropy": entropy, "grad_norm": grad_norm, **movement}
                history.append(torch.stack([*losses.values()]).detach())

        # --- logging ---
        metrics |= {f"losses/{name}": mean for name, mean in zip(losses, torch.stack(history).mean(0), strict=True)}
        seconds = time.time() - start_time
        speed = (iteration - start["iteration"]) * batch_size / seconds
        metrics |= {"charts/steps_per_second": speed, "charts/learning_rate": fraction_left * args.learning_rate}
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), global_step)
        score = f"{np.mean(recent_scores[-100:]):.1f}" if recent_scores else "none yet"
        if iteration % 10 == 1:
            minutes_left = (num_iterations - iteration) * batch_size / speed / 60
            say(f"step {global_step:,}  score {score}  {speed:,.0f} steps/s  {minutes_left:.0f} min left")

        # --- checkpoint ---
        broken = [list(losses)[i] for _, i in (~torch.stack(history).isfinite()).nonzero()]
        broken += [name for name, value in agent.state_dict().items() if not value.isfinite().all()]
        if broken:
            writer.close()
            fail(f"{broken[0]} is not finite in iteration {iteration}; a new run with lower learning rates may help.")
        if iteration % args.save_every == 0 or iteration == num_iterations or STOP_SIGNALS:
            counters = {"iteration": iteration, "global_step": global_step, "seconds": start["seconds"] + seconds}
            state = {name: optimizer.state_dict()["state"] for name, optimizer in optimizers.items()}
            checkpoint = {"agent": agent.state_dict(), "optimizers": state, "recent_scores": recent_scores[-100:]}
            save_checkpoint(run_dir, record | counters | checkpoint)
        if STOP_SIGNALS:
            break

    writer.close()
    say(f"{global_step:,} steps in {(start['seconds'] + seconds) / 60:.1f} min, score {score}: {run_dir}")
    if STOP_SIGNALS and iteration < num_iterations:
        say(f"stopped early; to go on: {shlex.join(['python', sys.argv[0], '--resume', str(run_dir)])}")
        raise SystemExit(128 + STOP_SIGNALS[0])
    return agent  # line 21


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.resume is not None:
        saved = replace(load_checkpoint(args.resume)["args"], resume=args.resume, cuda=args.cuda)
        if ":" in saved.env_id and args.env_id != saved.env_id:  # a checkpoint does not choose what is imported
            fail(f"{saved.env_id} imports a module; if you trust it, add --env-id {saved.env_id}.")
        args = tyro.cli(Args, default=saved)
        if args != replace(saved, total_timesteps=args.total_timesteps, cuda=args.cuda):
            fail("a resumed run keeps its arguments: leave out all but --resume, --total-timesteps and --cuda.")
    threading.excepthook = lambda failure: None  # TensorBoard's thread: the next add_scalar fails alike
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # which nohup sets
            signal.signal(number, request_stop)
    try:
        train(args)
    except BlockingIOError:
        fail(f"another process is training in {args.resume}.")
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        fail(f"{(str(error) or 'out of memory').splitlines()[0]}; checkpoints saved before are intact.")


if __name__ == "__main__":
    main()
