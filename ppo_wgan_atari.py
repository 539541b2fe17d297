"""PPO with a Wasserstein-GAN return distribution (PPO+WGAN) for Atari games, in one file.

The paper's baseline without inference. A generator G(z, s) turns noise z ~ N(0, 1) into a sampled return, and a critic
f(x, s), whose slope in x is at most 1, measures the Wasserstein distance between samples and Bellman targets x.

Paper: Li & Faisal, "Bayesian Distributional Policy Gradients", AAAI 2021. "Eq." and "line" in comments refer to it and
its Algorithm 1. Usage, logged metrics, implementation details and differences from the paper: docs/baselines.md.

    python ppo_wgan_atari.py --env-id SeaquestNoFrameskip-v4
    python ppo_wgan_atari.py --resume runs/NAME --total-timesteps 20000000
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

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    # --- experiment ---
    env_id: str = "BreakoutNoFrameskip-v4"
    """the task"""
    total_timesteps: int = 10_000_000
    """agent steps over all environments together"""
    seed: int = 1
    """seed of networks, sampling and environments; on CPU, with equally many threads, runs repeat bit for bit"""
    cuda: bool = torch.cuda.is_available()
    """train on the GPU (on by default where there is one)"""
    bf16: bool = False
    """compute the trunk in bfloat16, which is faster on GPUs and on CPUs with AVX512-BF16"""
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

    # --- PPO ---
    num_steps: int = 128
    """rollout length per environment (paper: 128 on Atari, 256 on MuJoCo); raised to --bootstrap-length if less"""
    bootstrap_length: Optional[int] = None
    """longest bootstrap k >= 1 of advantages and Bellman targets (default: the rollout length)"""
    gamma: float = 0.99
    """discount γ in (0, 1]"""
    gae_lambda: float = 0.95
    """λ in [0, 1] of generalised advantage estimation"""
    target: Literal["lambda", "sr"] = "lambda"
    """Bellman target x: "lambda" averages n-step targets (paper); "sr" draws one of them, which keeps the spread"""
    learning_rate: float = 2.5e-4
    """Adam's step size for policy, trunk and critic"""
    anneal_lr: bool = True
    """decay every learning rate linearly to 0 over the run"""
    update_epochs: int = 4
    """passes over each rollout"""
    minibatch_size: int = 256
    """samples |B| per gradient step; must divide num_envs * num_steps"""
    norm_adv: bool = True
    """standardise the advantages of each minibatch, also where they are only noise"""
    clip_coef: float = 0.1
    """PPO's clip range ε of the probability ratio"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the critic's loss beside the policy's loss"""
    max_grad_norm: float = 0.5
    """gradient norm at which each optimiser's step is clipped"""

    # --- WGAN ---
    latent_dim: int = 2
    """dimension of the latent z"""
    critic_learning_rate: float = 5e-4
    """Adam's step size for the critic f"""
    gradient_penalty: float = 10.0
    """weight of max(0, |df/dx| - 1)², which holds the slope of f to at most 1"""
    mean_coef: float = 1.0
    """weight of the term that fits the mean of G to the mean of x; 0 leaves it to f alone, as in a plain WGAN"""
    num_return_samples: int = 8
    """return samples averaged per state in the policy's advantage (Algorithm 1: 1); x always uses a single one"""


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    """Refuses in one sentence what cannot work. Integers are counts, from 1 on; floats are finite and not negative."""
    ranges = {"seed": (0, 2**30), "gamma": (0, 1), "gae_lambda": (0, 1), "num_envs": (1, 4096)}
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
    if args.bf16 and not args.cuda and not torch.cpu.get_capabilities().get("avx512_bf16"):  # Atari:
        fail("--bf16 needs a GPU or a CPU with AVX512-BF16; this CPU would only emulate it, slowly.")  # Atari:


# --- environments ---
class Environments:
    """Copies of the game, in C++, preprocessed as DeepMind's: a lost life ends a learning episode but not the game."""

    def __init__(self, args, seed, **picture):
        gym.register_envs(ale_py)
        try:
            game = gym.spec(args.env_id).kwargs
        except gym.error.Error as error:
            fail(f"{args.env_id} cannot be made: {error}")
        if not re.fullmatch(r"\w+NoFrameskip-v4|ALE/\w+-v5", args.env_id):
            fail(f"{args.env_id} is no Atari game of the kind XNoFrameskip-v4 or ALE/X-v5")
        rules = {"life_loss_info": True, "reward_clipping": False, "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        rules["repeat_action_probability"] = game["repeat_action_probability"]  # 0 in NoFrameskip-v4, 0.25 in v5
        self.envs = AtariVectorEnv(game["game"], args.num_envs, num_threads=torch.get_num_threads(), **rules, **picture)
        self.action_space, self.seed = self.envs.single_action_space, seed
        self.can_fire = ale_py.Action.FIRE in self.envs.ale.get_action_set()

    def reset(self):
        obs, infos = self.envs.reset(seed=self.seed)
        self.lives, self.life_lost = infos["lives"], np.zeros(len(obs), dtype=bool)
        return obs

    def step(self, actions):
        """Observations, rewards, terminations, truncations, observations before resets, and which games ended."""
        actions = np.where(self.life_lost & self.can_fire, 1, actions)  # FIRE, index 1, after a lost life
        obs, rewards, terminations, truncations, infos = self.envs.step(actions)
        # A lost life lowers the count; after the last one the count is already the next game's, which is not lower.
        game_over = truncations | (terminations & (infos["lives"] >= self.lives))
        self.lives, self.life_lost = infos["lives"], terminations & ~game_over
        return obs, rewards, terminations, truncations, infos.get("final_obs"), game_over


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


class Trunk(nn.Module):
    """State embedding c(s), shared by policy and critic: the Nature CNN on 4 stacked frames."""

    def __init__(self, bf16):
        super().__init__()
        self.bf16 = bf16
        self.conv1 = layer_init(nn.Conv2d(4, 32, 8, stride=4))
        self.conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
        self.conv3 = layer_init(nn.Conv2d(64, 64, 3, stride=1))
        self.linear = layer_init(nn.Linear(7 * 7 * 64, 512))

    def forward(self, obs):
        h = obs.permute(0, 3, 1, 2).float()  # kept as (height, width, stack), the layout in which convolutions are fast
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            h = F.conv2d(h, self.conv1.weight / 255, self.conv1.bias, stride=4).relu_()  # scales weights, not pixels
            h = F.relu_(self.conv3(F.relu_(self.conv2(h))))
            return F.relu(self.linear(h.permute(0, 2, 3, 1).flatten(1))).float()


class Policy(nn.Module):
    """Categorical, on the shared embedding."""

    def __init__(self, state_dim, num_actions):
        super().__init__()
        self.logits = layer_init(nn.Linear(state_dim, num_actions), std=0.01)

    def forward(self, obs, c):
        return Categorical(logits=self.logits(c), validate_args=False)


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
    """The return distribution given c(s): generator G(z,s) of noise z, and a critic f(x,s) of what it generates."""

    def __init__(self, state_dim, hidden, args):
        super().__init__()
        self.latent_dim = args.latent_dim
        self.generator = ConditionalMLP(args.latent_dim, state_dim, 1, hidden)
        self.critic = ConditionalMLP(1, state_dim, 1, hidden)
        self.register_buffer("residual_scale", torch.tensor(math.nan))

    def sample(self, c, num_samples):
        """Returns g = G(z, s) with z ~ N(0, 1) (lines 6 and 8), as a tensor (num_samples, *states)."""
        return self.generator(torch.randn(num_samples, *c.shape[:-1], self.latent_dim, device=c.device), c).squeeze(-1)

    def centre(self, c):
        """b(s) = G(0, s), which is subtracted from the returns of a state; computed once per rollout."""
        return self.generator(torch.zeros(*c.shape[:-1], self.latent_dim, device=c.device), c).squeeze(-1)

    def relative(self, x, b):
        """(x - b(s)) / w, as the critic sees a return: its spread would be lost beside b(s)."""
        return ((x - b) / self.residual_scale).unsqueeze(-1)

    def track_residuals(self, residuals):
        """Moves w, a running mean of |x - b(s)|, which the first batch sets; the mean square would follow outliers."""
        scale, w = residuals.abs().mean(), self.residual_scale
        w.copy_(torch.where(w.isnan(), scale, w.lerp(scale, 0.5)))

    def f(self, x, b, c):
        return self.critic(self.relative(x, b), c).squeeze(-1)


class Agent(nn.Module):  # all that is learnt, running statistics included
    def __init__(self, envs, args):
        super().__init__()
        # Atari: policy and critic share the trunk
        state_dim = 512
        self.trunk = Trunk(args.bf16)
        self.policy = Policy(state_dim, int(envs.action_space.n))

        self.reward_stats = RunningMeanStd()
        self.return_model = ReturnModel(state_dim, (256, 128), args)  # WGAN, Atari:

    def observe(self, obs):
        """Observations as the networks take them: bytes, (height, width, stack)."""
        return torch.as_tensor(obs, device=self.reward_stats.mean.device).permute(0, 2, 3, 1).contiguous()


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


def f_loss(model, x, x_tilde, b, c, gradient_penalty):
    """E f(x̃, s) - E f(x, s) with a penalty on slopes above 1, and its negative without it, an estimate of W1(x, x̃) / w.
    Smaller slopes are free: to turn from 1 to -1, as it must when G overtakes x, a slope passes through 0."""
    between = torch.lerp(x, x_tilde, torch.rand_like(x)).requires_grad_()  # at the same state
    f_real, f_fake, f_between = model.f(torch.stack([x, x_tilde, between]), b, c)
    (slopes,) = torch.autograd.grad(f_between.sum(), between, create_graph=True)
    distance = (f_real - f_fake).mean()
    return gradient_penalty * F.relu(slopes.abs() * model.residual_scale - 1).square().mean() - distance, distance


def generator_losses(model, x, b, c):
    """-E f(G(z, s), s) in units of returns, and ||x - E G(z, s)||²: the product of two samples' errors is on average
    the square of their mean's error. f needs an embedding that tells states apart: the second term teaches it."""
    g, g_prime = model.sample(c, 2)
    return -model.residual_scale * model.f(g, b, c.detach()).mean(), ((x - g) * (x - g_prime)).mean()


def make_optimizers(agent, args):
    """One Adam for each adversary, and a main one for all other parameters: a layer that a fork adds is trained."""

    def adam(parameters, learning_rate, betas=(0.9, 0.999)):
        group = {"params": parameters, "lr": learning_rate, "initial_lr": learning_rate}
        return torch.optim.Adam([group], betas=betas, eps=1e-5, fused=True)

    # WGAN: the generator goes without momentum, with which it and the critic circle each other
    critic, generator = ([*net.parameters()] for net in (agent.return_model.critic, agent.return_model.generator))
    main = adam([p for p in agent.parameters() if p not in {*critic, *generator}], args.learning_rate)
    main.add_param_group(adam(generator, args.learning_rate, (0.0, 0.99)).param_groups[0])
    return {"main": main, "critic": adam(critic, args.critic_learning_rate, (0.0, 0.99))}


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
    agent = Agent(envs, args).to(device)  # line 1
    model = agent.return_model  # WGAN:
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
        embeddings = []  # Atari: which the policy needs
        for t in range(args.num_steps):
            with torch.no_grad():
                embeddings.append(agent.trunk(next_obs))  # Atari:
                action = agent.policy(next_obs, embeddings[-1]).sample()  # Atari:
            raw_obs, reward, terminated, truncated, last_obs, ended = envs.step(action.cpu().numpy())
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
            embeddings = torch.stack(embeddings)  # Atari:
            log_probs = agent.policy(obs, embeddings).log_prob(actions)
            if cut_short:  # a truncated step is followed by its own episode's last state, not by the next one's first
                steps, indices, last_obs = zip(*cut_short, strict=True)
                last_embeddings = agent.trunk(agent.observe(np.stack(last_obs)))
            gae = (terminations, terminations | truncations, args.gamma, args.gae_lambda, k)
            # WGAN: returns, targets and advantages
            samples = model.sample(torch.cat([embeddings, agent.trunk(next_obs)[None]]), args.num_return_samples)
            samples, next_samples = samples[:, :-1], samples[:, 1:].clone()
            if cut_short:
                next_samples[:, steps, indices] = model.sample(last_embeddings, args.num_return_samples)
            g, next_g = samples[0], next_samples[0]
            x = sr_targets(rewards, next_g, *gae) if args.target == "sr" else k_step_gae(rewards, g, next_g, *gae) + g
            advantages = k_step_gae(rewards, samples.mean(0), next_samples.mean(0), *gae)  # line 10
            b = model.centre(embeddings)
            model.track_residuals(x - b)

            # WGAN: is the return model healthy?
            some_x, returns = x[::16], model.sample(embeddings[::16], 64)
            low, high = returns.quantile(torch.tensor([0.1, 0.9], device=device), dim=0)
            metrics = {"return_model/explained_variance": 1 - (some_x - returns.mean(0)).var() / some_x.var()}
            metrics["return_model/coverage_80"] = ((low <= some_x) & (some_x <= high)).float().mean()
            metrics["return_model/residual_scale"] = model.residual_scale

        # --- minibatch updates (lines 14-20) ---
        batch = [values.flatten(0, 1) for values in (obs, actions, log_probs, advantages, x)]
        history = []
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size, device=device).split(args.minibatch_size):
                mb_obs, mb_actions, mb_log_probs, mb_advantages, mb_x = (v.index_select(0, rows) for v in batch)
                c = agent.trunk(mb_obs)  # the only trunk pass
                # WGAN:
                s, mb_b = c.detach(), b.flatten()[rows]  # c(s) without gradient: the adversaries do not train the trunk
                x_tilde = model.sample(s, 1)[0].detach()
                critic_loss, distance = f_loss(model, mb_x, x_tilde, mb_b, s, args.gradient_penalty)
                descend(optimizers["critic"], critic_loss, args.max_grad_norm)
                generator_loss, mean_loss = generator_losses(model, mb_x, mb_b, c)
                losses = {"critic": critic_loss, "critic_w1": distance, "generator": generator_loss, "mean": mean_loss}
                return_loss = generator_loss + args.mean_coef * mean_loss

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
