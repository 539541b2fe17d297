"""Do the critics learn the return's distribution? Markov reward processes whose returns have known laws, learnt as the scripts do.

Networks, losses, optimisers, Bellman targets and defaults are imported from the scripts; only the environment is replaced, and the
trunk's input is a fixed random feature of the state. Nothing is normalised: the laws have a scale of about 1. What is measured, and
the results: docs/return_distributions.md.

    python benchmark/return_distributions.py --quick                # one seed, three processes, 3,200 gradient steps
    python benchmark/return_distributions.py --workers 2 --write    # all, hours; run it again to go on after an interruption
"""

import ast
import csv
import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium.spaces import Box
from torch.nn.functional import mse_loss

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bdpg_mujoco as bdpg
import ppo_qr_atari as qr
import ppo_wgan_mujoco as wgan
from benchmark import ppo_scalar_mujoco as scalar
from benchmark.common import fail, fill, load_jobs, make_folder, run_jobs, start, table

SCRIPTS = {"bdpg": bdpg, "wgan": wgan, "qr": qr, "scalar": scalar}
NAMES = {"bdpg": "BDPG", "wgan": "PPO+WGAN", "qr": "PPO+QR", "scalar": "scalar"}
COLOURS = {"bdpg": "#0072B2", "wgan": "#D55E00", "qr": "#009E73", "scalar": "#000000"}  # safe for the colour-blind (Okabe and Ito)
# The targets (name, λ) each critic is trained with. At λ = 0 and λ = 1 "sr" and "lambda" are the same target.
TARGETS = {
    "bdpg": [("sr", 0.95), ("lambda", 0.95), ("lambda", 0.0), ("lambda", 1.0)],
    "wgan": [("sr", 0.95)],
    "qr": [("sr", 0.95)],
    "scalar": [("sr", 0.95)],
}
# On the gaussian process the fastest critic has more of them, to show how "lambda" shrinks the distribution.
SWEEP = [("lambda", value) for value in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)] + [("sr", value) for value in (0.5, 0.8, 0.9, 0.98)]
KEYS = ("critic", "process", "target", "gae_lambda", "seed", "epochs", "steps")  # of a job
NUM_SAMPLES, NUM_FEATURES, END = 4096, 8, -1
DOCS = Path(__file__).resolve().parent.parent / "docs"
DEFAULT_OUTPUT = Path("runs/return_distributions")


# --- reward processes ---

root2 = 2**0.5
# Laws with mean 0 and standard deviation 1: the distribution function, and n draws.
SHAPES = {
    "normal": (torch.special.ndtr, lambda n: torch.randn(n)),
    "exponential": (lambda z: -torch.expm1(-(z + 1).clamp(min=0)), lambda n: torch.empty(n).exponential_() - 1),
    "reflected": (lambda z: torch.exp((z - 1).clamp(max=0)), lambda n: 1 - torch.empty(n).exponential_()),
    "uniform": (lambda z: (z / 12**0.5 + 0.5).clamp(0, 1), lambda n: 12**0.5 * (torch.rand(n) - 0.5)),
    "bimodal": (  # ±0.96 with equal chances, each blurred by 0.28
        lambda z: (torch.special.ndtr((z - 0.96) / 0.28) + torch.special.ndtr((z + 0.96) / 0.28)) / 2,
        lambda n: 0.96 * torch.sign(torch.rand(n) - 0.5) + 0.28 * torch.randn(n),
    ),
    "laplace": (
        lambda z: 0.5 + 0.5 * torch.sign(z) * -torch.expm1(-root2 * z.abs()),
        lambda n: (torch.empty(n).exponential_() - torch.empty(n).exponential_()) / root2,
    ),
}


@dataclass
class Process:
    """A Markov reward process, and the law of the discounted return from each of its states."""

    gamma: float
    step: Callable  # states -> rewards, next states (END where the episode terminates)
    cdf: Callable  # (n, states) -> (n, states), the distribution function of each state's return
    mean: torch.Tensor
    std: torch.Tensor
    start: torch.Tensor  # episodes start in one of these states, all with the same chance
    shown: int = 0  # the state in the figure
    modes: tuple = ()  # of the shown state's law: (from, to, probability) of each

    @property
    def features(self):
        return torch.randn(len(self.mean), NUM_FEATURES, generator=torch.Generator().manual_seed(7))

    def invert(self, levels):
        """The quantile of each state's law at levels (n, states): the least y with cdf(y) >= level, by bisection."""
        low, high = (self.mean + side * 40 * self.std + torch.zeros_like(levels) for side in (-1, 1))
        for _ in range(48):
            middle = (low + high) / 2
            enough = self.cdf(middle) >= levels
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high

    def draw(self, n):
        """True returns (n, states)."""
        return self.invert(torch.rand(n, len(self.mean), dtype=torch.float64))

    @cached_property
    def quantiles(self):
        levels = (torch.arange(NUM_SAMPLES, dtype=torch.float64) + 0.5) / NUM_SAMPLES
        return self.invert(levels.unsqueeze(1).expand(-1, len(self.mean)))

    @cached_property
    def bins(self):
        low, high = self.quantiles[[4, -5], self.shown] + torch.tensor([-0.3, 0.3]) * self.std[self.shown]
        return torch.linspace(low, high, 37, dtype=torch.float64)


def mixture(laws, gamma, step, start, **rest):
    """A process whose laws are mixtures: for each state a list of (weight, shape, mean, std)."""

    def cdf(y):
        return torch.stack([sum(w * SHAPES[s][0]((y[:, i] - m) / std) for w, s, m, std in law) for i, law in enumerate(laws)], 1)

    mean = torch.tensor([sum(w * m for w, _, m, _ in law) for law in laws], dtype=torch.float64)
    square = torch.tensor([sum(w * (m * m + std * std) for w, _, m, std in law) for law in laws], dtype=torch.float64)
    return Process(gamma, step, cdf, mean, (square - mean**2).sqrt(), torch.tensor(start), **rest)


def stationary(shape, mean, std, gamma, reward):
    """One state for ever, and rewards such that the return has the given law."""
    return mixture([[(1, shape, mean, std)]], gamma, lambda states: (reward(len(states)), states), [0])


def self_decomposable(shape, mean, std, p_zero, gamma=0.99):
    """G = r + γ G' in law, where r is 0 with probability p_zero and else has the law of G itself.

    For Exp(1), with the characteristic function φ(t) = 1 / (1 - it), φ(t) / φ(γt) = (1 - iγt) / (1 - it) = γ + (1 - γ) φ(t);
    for the Laplace law, φ(t) = 1 / (1 + t²), it is (1 + γ²t²) / (1 + t²) = γ² + (1 - γ²) φ(t)."""
    return stationary(shape, mean, std, gamma, lambda n: (torch.rand(n) >= p_zero) * (mean + std * SHAPES[shape][1](n)))


def tree(rewards, branches, start, gamma=0.99, **rest):
    """States that lead to later ones only: (shape, mean, std) of each state's reward, and (p, next, other next) or the end.

    A state's law is the mixture of its branches' laws, shifted, shrunk and blurred by the reward. That is exact where the reward is
    fixed, or where it and all that follows is normal."""
    laws = [[] for _ in rewards]
    for i, (shape, mean, std) in reversed(list(enumerate(rewards))):
        p, *following = branches[i]
        for chance, j in zip((p, 1 - p), following, strict=True):
            laws[i] += [(chance * w, s, mean + gamma * m, (std**2 + (gamma * d) ** 2) ** 0.5) for w, s, m, d in laws[j] if j != END]
        laws[i] = laws[i] or [(1, shape, mean, std)]
    which = torch.tensor([list(SHAPES).index(shape) for shape, _, _ in rewards])
    means, stds = torch.tensor([reward[1:] for reward in rewards]).T
    p_first, first, second = torch.tensor(branches).T

    def step(states):
        draws = torch.stack([draw(len(states)) for _, draw in SHAPES.values()])
        pay = means[states] + stds[states] * draws.gather(0, which[states].unsqueeze(0))[0]
        return pay, torch.where(torch.rand(states.shape) < p_first[states], first[states], second[states]).long()

    return mixture(laws, gamma, step, start, **rest)


def chain():
    """Six states in a row with normal rewards."""
    rewards = [("normal", m, s) for m, s in [(0.5, 0.8), (-1.0, 0.1), (1.5, 0.6), (-0.5, 0.4), (1.0, 0.1), (-1.5, 0.2)]]
    return tree(rewards, [(1, i + 1, END) for i in range(5)] + [(1, END, END)], [0])


def fork():
    """State 0 leads to a bad branch (1, then 3) or a good one (2, then 4): its return has two modes, far apart."""
    rewards = [("normal", m, s) for m, s in [(0.0, 0.0), (-0.5, 0.1), (0.5, 0.2), (-1.0, 0.2), (1.0, 0.1)]]
    branches = [(0.4, 1, 2), (1, 3, END), (1, 4, END), (1, END, END), (1, END, END)]
    return tree(rewards, branches, [0], modes=((-2.5, -0.5, 0.4), (0.5, 2.5, 0.6)))


def conditional(leaves=12):
    """24 states, no two laws alike: 12 pay a reward of one of six shapes and end, 12 pay a fixed reward and lead to one of two of
    those, which gives mixtures."""
    uniform = torch.rand(4, leaves, generator=torch.Generator().manual_seed(7))
    means, stds = (4 * uniform[0] - 2).tolist(), (0.15 * (1 / 0.15) ** uniform[1]).tolist()
    rewards = [("normal", fixed, 0.0) for fixed in (2 * uniform[2] - 1).tolist()]
    rewards += [(list(SHAPES)[i % len(SHAPES)], means[i], stds[i]) for i in range(leaves)]
    branches = [(p, leaves + i, leaves + (i + 5) % leaves) for i, p in enumerate((0.2 + 0.6 * uniform[3]).tolist())]
    return tree(rewards, branches + [(1, END, END)] * leaves, list(range(2 * leaves)), shown=4)


def geometric(gamma=0.99, p=0.5):
    """A reward of 1 at each step, and the end with probability p: the return (1 - γ^n) / (1 - γ) has atoms at n = 1, 2, ..."""

    def cdf(y):
        steps = torch.floor(torch.log((1 - (1 - gamma) * y).clamp(min=1e-9)) / np.log(gamma) + 1e-9)
        return 1 - (1 - p) ** steps.clamp(min=0)

    def step(states):
        return torch.ones(states.shape), torch.where(torch.rand(states.shape) < p, END, states)

    power, square = (p * x / (1 - (1 - p) * x) for x in (gamma, gamma**2))  # E[γ^n] and E[γ^2n]
    mean, std = (1 - power) / (1 - gamma), (square - power**2) ** 0.5 / (1 - gamma)
    return Process(gamma, step, cdf, torch.tensor([mean]).double(), torch.tensor([std]).double(), torch.tensor([0]))


PROCESSES = {
    "uniform": stationary("uniform", 1, 3**-0.5, 0.5, lambda n: torch.randint(2, (n,)).float()),  # binary digits of U[0, 2]
    "exponential": self_decomposable("exponential", 1, 1, p_zero=0.99),
    "laplace": self_decomposable("laplace", 0, root2, p_zero=0.99**2),
    "gaussian": stationary("normal", 0, 1, 0.99, lambda n: (1 - 0.99**2) ** 0.5 * torch.randn(n)),
    "chain": chain(),
    "fork": fork(),
    "geometric": geometric(),
    "conditional": conditional(),
}


# --- training, as in the scripts ---


def update_bdpg(agent, optimizers, args, count, c, x, centre):
    model, s = agent.return_model, c.detach()
    joints, z_tilde, x_tilde, z_prime = bdpg.sample_joints(model, x, centre, s)
    d_loss, d_penalty, _ = bdpg.discriminator_loss(model, joints, s, 8 * args.r1_coef if count % 8 == 0 else 0)
    bdpg.descend(optimizers["discriminator"], d_loss + d_penalty, args.max_grad_norm)
    bdpg.descend(optimizers["encoder and prior"], bdpg.encoder_prior_loss(model, joints, s), args.max_grad_norm)
    return sum(bdpg.generator_losses(model, x, x_tilde, z_tilde, z_prime, c, args.law_coef))


def update_wgan(agent, optimizers, args, count, c, x, centre):
    model, s = agent.return_model, c.detach()
    for _ in range(args.num_critic_steps):
        with torch.no_grad():
            x_tilde = model.sample(s, 1)[0]
        loss, _ = wgan.critic_loss(model, x, x_tilde, centre, s, args.gradient_penalty)
        wgan.descend(optimizers["critic"], loss, args.max_grad_norm)
    return sum(wgan.wgan_losses(model, x, centre, c, args.mean_coef))


# Each takes the minibatch's number, c(s), x and b(s), makes the critic's own steps, and returns the loss of generator and trunk.
UPDATES = {
    "bdpg": update_bdpg,
    "wgan": update_wgan,
    "qr": lambda agent, optimizers, args, count, c, x, centre: qr.quantile_loss(agent.return_model.generator(c), x),
    "scalar": lambda agent, optimizers, args, count, c, x, centre: mse_loss(agent.return_model.generator(c).squeeze(-1), x),
}


def version(critic):
    """Of the code that a job takes from the scripts, comments aside, to tell finished jobs of an older one. PPO+QR's trunk, agent
    and arguments are the scalar critic's; environments, actions, folders and training loops play no part here."""
    code = hashlib.sha256()
    for script in [SCRIPTS[critic]] + [scalar] * (critic == "qr"):
        for section in re.split("^(?=# --- )", Path(script.__file__).read_text(), flags=re.MULTILINE):
            if not section.startswith(("# --- environments", "# --- the run's folder", "# --- training")):
                parts = [part for part in ast.parse(section).body if getattr(part, "name", "") != "DiagonalGaussian"]
                code.update("".join(map(ast.dump, parts)).encode())
    return code.hexdigest()[:12]


def default_args(critic):
    """The script's own; PPO+QR, an Atari script, gets those of MuJoCo."""
    return qr.Args(**vars(scalar.Args(cuda=False))) if critic == "qr" else SCRIPTS[critic].Args(cuda=False)


def make_agent(critic, args):
    """The script's agent, whose policy rests; PPO+QR, an Atari script, gets the trunk of MuJoCo."""
    script = scalar if critic == "qr" else SCRIPTS[critic]
    space = Box(-1, 1, (NUM_FEATURES,))
    agent = script.Agent(SimpleNamespace(single_observation_space=space, single_action_space=space), args)
    if critic == "qr":
        agent.return_model = qr.ReturnModel(agent.trunk.output_dim, args.num_quantiles)
    return agent


def roll_out(process, states, num_steps):
    """The states before each step and after the last, rewards and terminations of the steps; ended episodes start again."""
    visited, rewards, terminations = [states], [], []
    for _ in range(num_steps):
        reward, states = process.step(states)
        rewards.append(reward)
        terminations.append(states == END)
        states = torch.where(states == END, process.start[torch.randint(len(process.start), states.shape)], states)
        visited.append(states)
    return torch.stack(visited), torch.stack(rewards), torch.stack(terminations)


def train(critic, process, target, gae_lambda, seed, epochs, steps):
    """The agent after `steps` gradient steps on a process, and its W1 on the way there, as [[step, W1], ...].

    A rollout has as many gradient steps as in the scripts; those that take fewer passes over it have more environments instead."""
    torch.manual_seed(seed)
    script, args = SCRIPTS[critic], default_args(critic)
    agent = make_agent(critic, args)
    model, features = agent.return_model, process.features
    optimizers = script.make_optimizers(agent, args)
    num_envs = args.num_envs * args.update_epochs // epochs
    states = process.start[torch.randint(len(process.start), (num_envs,))]
    batch_size = num_envs * args.num_steps
    steps_per_iteration = epochs * batch_size // args.minibatch_size
    num_iterations, curve, count = steps // steps_per_iteration, [], 0
    for iteration in range(1, num_iterations + 1):
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = (1 - (iteration - 1) / num_iterations) * group["initial_lr"]
        visited, rewards, dones = roll_out(process, states, args.num_steps)
        states, centre = visited[-1], torch.zeros_like(rewards)
        with torch.no_grad():
            embeddings = agent.trunk(features)[visited]
            samples = model.sample(embeddings, 1)[0]  # x uses one sample; the script averages more of them for its policy alone
            g, next_g = samples[:-1], samples[1:]
            gae_args = (dones, dones, process.gamma, gae_lambda, args.num_steps)
            if target == "sr":
                x = script.sr_targets(rewards, next_g, *gae_args)
            else:
                x = script.k_step_gae(rewards, g, next_g, *gae_args) + g
            if critic in ("bdpg", "wgan"):
                centre = model.centre(embeddings[:-1])
                model.track_residuals(x - centre)
        b_obs, b_x, b_centre = features[visited[:-1]].flatten(0, 1), x.flatten(), centre.flatten()
        for _ in range(epochs):
            for index in torch.randperm(batch_size).split(args.minibatch_size):
                c = agent.trunk(b_obs[index])
                return_loss = UPDATES[critic](agent, optimizers, args, count, c, b_x[index], b_centre[index])
                script.descend(optimizers["policy, trunk and generator"], args.vf_coef * return_loss, args.max_grad_norm)
                count += 1
        if iteration in (1, 2, 5, num_iterations) or iteration % 10 == 0:
            curve.append([iteration * steps_per_iteration, w1_distance(sample_returns(agent, process), process).mean().item()])
    return agent, curve


# --- measures ---


def sample_returns(agent, process):
    with torch.no_grad():
        return agent.return_model.sample(agent.trunk(process.features), NUM_SAMPLES).double()


def w1_distance(samples, process):
    """Wasserstein-1 distance of sampled returns (NUM_SAMPLES, states) from each state's law, in units of its standard deviation."""
    return (samples.sort(0).values - process.quantiles).abs().mean(0) / process.std


def measure(samples, process):
    """Per state: W1, error of the mean, ratio of standard deviations, share of true returns in the central 80 % interval."""
    low, high = samples.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), 0)
    inside = process.cdf(high[None]) - process.cdf((low - 1e-6 * process.std)[None])
    of_shown = samples[:, process.shown]
    mode_errors = [((a <= of_shown) & (of_shown <= b)).double().mean().item() - mass for a, b, mass in process.modes]
    return {
        "w1": w1_distance(samples, process).tolist(),
        "mean_error": ((samples.mean(0) - process.mean) / process.std).tolist(),
        "std_ratio": (samples.std(0) / process.std).tolist(),
        "coverage": inside[0].tolist(),
        "mode_errors": mode_errors,
        "histogram": (np.histogram(of_shown, process.bins)[0] / len(samples)).tolist(),
    }


INFERENCE = ("reconstruction_error", "mean_of_latent", "std_of_latent", "information_gain", "information_gain_unseen")


def measure_inference(agent, process):
    """BDPG's encoder on true returns x, averaged over states: RMS of x - G(z̃, s) in units of the law's std, the law of z̃ less the
    prior's mean, and information gains (capped as in the script); also of x + 3 std, which the model has hardly ever seen."""
    model, c = agent.return_model, agent.trunk(process.features)
    centre, x = model.centre(c), process.draw(NUM_SAMPLES).float()
    mean, std = model.encode(model.relative(x, centre), c)
    z_tilde = mean + std * torch.randn_like(std)
    misses, latents = x - model.generate(z_tilde, c), z_tilde - model.prior(c)
    of_g = model.encode(model.relative(model.sample(c, NUM_SAMPLES), centre), c)
    of_unseen = model.encode(model.relative(x + 3 * process.std.float(), centre), c)
    gains = [bdpg.gaussian_kl(*of_x, *of_g).clamp(max=bdpg.Args.u_bar) for of_x in ((mean, std), of_unseen)]
    values = [misses.square().mean(0).sqrt() / process.std, latents.mean(0).abs(), latents.std(0), *gains]
    return {name: value.mean().item() for name, value in zip(INFERENCE, values, strict=True)}


def run_job(job):
    """Trains and measures; returns the job with its results."""
    torch.set_num_threads(1)
    critic, process = job["critic"], PROCESSES[job["process"]]
    start = time.process_time()
    agent, curve = train(critic, process, *(job[key] for key in KEYS[2:]))
    results = {"seconds": time.process_time() - start, "version": version(critic), "curve": curve}
    results |= measure(sample_returns(agent, process), process)
    if critic == "bdpg":
        with torch.no_grad():
            results |= measure_inference(agent, process)
    return json.loads(json.dumps(job | results), parse_float=lambda text: float(f"{float(text):.5g}"))  # short lines in the file


# --- the bench ---


@dataclass
class Args:
    critics: tuple[Literal[tuple(SCRIPTS)], ...] = tuple(SCRIPTS)
    """return models to train"""
    processes: tuple[Literal[tuple(PROCESSES)], ...] = tuple(PROCESSES)
    """reward processes to train them on"""
    targets: tuple[Literal["sr", "lambda"], ...] = ("sr", "lambda")
    """Bellman targets to train them with"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """of networks and rollouts, a job for each"""
    steps: int = 20_000
    """gradient steps of a job, 160 to a rollout"""
    epochs: Literal[1, 2, 5, 10] = 1
    """passes over a rollout of 160 / epochs environments; 10 is what the scripts do, where data are not free"""
    quick: bool = False
    """one seed, three processes, target sr, 3,200 steps"""
    workers: int = 1
    """jobs at the same time, one thread each"""
    output: Optional[Path] = None
    """folder of finished jobs (jobs.jsonl; they are not done again), tables, figures and the data behind them (default:
    runs/return_distributions; with --write benchmark/results/return_distributions, whose jobs are in the repository)"""
    write: bool = False
    """write tables and figures into docs/ too"""


def plan(args):
    """The jobs, first those with the target that all critics have, each part seed by seed: an interrupted bench has its tables."""
    jobs = []
    for seed, process, critic in itertools.product(args.seeds, args.processes, args.critics):
        sweep = process == "gaussian" and critic == "qr" and seed in (1, 2) and not args.quick
        for target, gae_lambda in dict.fromkeys(TARGETS[critic] + SWEEP * sweep):
            if target in args.targets:
                values = (critic, process, target, gae_lambda, seed, args.epochs, args.steps)
                jobs.append(dict(zip(KEYS, values, strict=True)))
    return sorted(jobs, key=lambda job: (job["target"], job["gae_lambda"]) != ("sr", 0.95))


def select(jobs, **wanted):
    return [job for job in jobs if all(job.get(name) == value for name, value in wanted.items())]


def variants(jobs):
    """What was run, in the bench's order: {"critic, target λ": its keys and values in a job}."""
    keys = [dict(critic=critic, target=name, gae_lambda=value) for critic in TARGETS for name, value in TARGETS[critic]]
    return {f"{NAMES[k['critic']]}, {k['target']} {k['gae_lambda']:g}": k for k in keys if select(jobs, **k)}


def over_states(jobs, measure, combine):
    """Of absolute values; nan where there is nothing."""
    return float(combine([combine(np.abs(job[measure])) for job in jobs if job[measure] != []] or [np.nan]))


def markdown(title, header, rows):
    cells = [["" if cell != cell else f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return f"{title}\n\n{table(header, cells)}\n"


def make_tables(jobs):
    names = [name for name in PROCESSES if select(jobs, process=name)]
    columns, summary, by_process, inference = variants(jobs), [], [], []
    for label, variant in columns.items():
        everything = select(jobs, **variant)
        w1, mean, std, coverage, seconds = (
            np.nanmean([over_states(select(everything, process=name), measure, np.mean) for name in names])
            for measure in ("w1", "mean_error", "std_ratio", "coverage", "seconds")
        )
        worst_w1, worst_mean, worst_modes = (over_states(everything, m, np.max) for m in ("w1", "mean_error", "mode_errors"))
        number = f"{len({job['process'] for job in everything})}, {len(everything)}"
        summary.append([label, number, w1, worst_w1, mean, worst_mean, std, coverage, worst_modes, round(seconds)])
    for name in names:
        torch.manual_seed(0)
        floor = w1_distance(PROCESSES[name].draw(NUM_SAMPLES), PROCESSES[name]).mean().item()
        own = [select(jobs, process=name, **variant) for variant in columns.values()]
        cells = [f"{over_states(some, 'w1', np.mean):.3f} ({over_states(some, 'w1', np.max):.2f})" if some else "" for some in own]
        by_process.append([name, len(PROCESSES[name].mean), floor, *cells])
        some = select(jobs, process=name, critic="bdpg", target="sr", gae_lambda=0.95)
        inference += [[name, *(over_states(some, measure, np.mean) for measure in INFERENCE)]] if some else []
    seeds, epochs = ", ".join(map(str, sorted({job["seed"] for job in jobs}))), jobs[0]["epochs"]
    header = "critic, target λ|processes, jobs|W1|worst|error of mean|worst|std, model / true|coverage of 80 %"
    header += "|worst error of modes|CPU seconds"
    return "\n".join(
        [
            f"{len(jobs)} jobs of {jobs[0]['steps']:,} gradient steps, passes over a rollout: {epochs}, seeds {seeds}.\n",
            markdown("Mean over processes, and the worst state of any process and seed:", header.split("|"), summary),
            markdown("W1 by process (and its worst state):", ["process", "states", "floor", *columns], by_process),
            markdown("Inference of BDPG with target sr:", ["process", *(name.replace("_", " ") for name in INFERENCE)], inference),
        ]
    )


def save(path, header, rows, figure=None, handles=None):
    """The data, and a figure of it with the legend below its panels."""
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        cells = [[f"{value:.5g}" if isinstance(value, float) else value for value in row] for row in rows]
        csv.writer(file).writerows([header, *cells])
    if figure:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=int(figure.get_figwidth() // 2.5), frameon=False
        )
        figure.savefig(path.with_suffix(".png"), dpi=130)
        plt.close(figure)


def plot_densities(jobs, path):
    """The law of one state of each process, and what the critics make of it (all seeds together)."""
    names = [name for name in PROCESSES if select(jobs, process=name)]
    critics = [critic for critic in ("bdpg", "wgan", "qr") if select(jobs, critic=critic)]
    size = dict(figsize=(8.5, 1 + 1.4 * len(names)), squeeze=False, layout="constrained")
    figure, axes = plt.subplots(len(names), len(critics), sharex="row", sharey="row", **size)
    handles, rows = {}, []
    for i, name in enumerate(names):
        process = PROCESSES[name]
        truth = process.cdf(process.bins.unsqueeze(1).expand(-1, len(process.mean)))[:, process.shown].diff().numpy()
        edges, width = process.bins.numpy(), float(process.bins[1] - process.bins[0])
        for j, critic in enumerate(critics):
            handles["truth"] = axes[i, j].stairs(truth / width, edges, fill=True, color="0.8")
            for label, variant in variants(select(jobs, process=name, critic=critic, gae_lambda=0.95)).items():
                model = np.mean([job["histogram"] for job in select(jobs, process=name, **variant)], 0)
                style = dict(color=COLOURS[critic], ls="-" if variant["target"] == "sr" else ":", lw=1.5)
                handles[label] = axes[i, j].stairs(model / width, edges, **style)
                rows += [[name, label, *values] for values in np.stack([edges[:-1], edges[1:], truth, model], 1).tolist()]
            axes[-1, j].set_xlabel("return")
            axes[0, j].set_title(NAMES[critic])
        axes[i, 0].set(ylabel=name, ylim=(0, 1.6 * (truth / width).max()), yticks=[])  # a peak above that is cut off
    figure.supylabel("probability density", fontsize="medium")
    save(path, ["process", "critic", "from", "to", "truth", "model"], rows, figure, handles)


def plot_curves(jobs, path):
    names = [name for name in PROCESSES if select(jobs, process=name)]
    height = (len(names) + 1) // 2
    figure, axes = plt.subplots(height, 2, figsize=(8.5, 1 + 2 * height), squeeze=False, sharex=True, layout="constrained")
    handles, rows = {}, []
    for name, axis in zip(names, axes.flat, strict=False):
        for label, variant in variants(select(jobs, process=name, target="sr")).items():
            curves = np.array([job["curve"] for job in select(jobs, process=name, **variant)])
            steps, w1, colour = curves[0, :, 0], curves[:, :, 1], COLOURS[variant["critic"]]
            (handles[label],) = axis.plot(steps, w1.mean(0), color=colour)
            axis.fill_between(steps, w1.min(0), w1.max(0), color=colour, alpha=0.2, lw=0)
            rows += [[name, label, *values] for values in np.stack([steps, w1.mean(0), w1.min(0), w1.max(0)], 1).tolist()]
        axis.set(title=name, xscale="log", yscale="log", ylim=(0.01, 3))
    for axis in axes[-1]:
        axis.set_xlabel("gradient steps")
    figure.supylabel("W1 in std of the law; mean and range of seeds", fontsize="medium")
    save(path, ["process", "critic", "step", "w1", "least", "most"], rows, figure, handles)


def shrinkage(gae_lambda, gamma=0.99):
    """The std of what the target "lambda" converges to over that of the return, where rewards are independent with variance σ².

    x_t = r_t + γ ((1-λ) g_{t+1} + λ x_{t+1}), all independent: Var x = (σ² + γ²(1-λ)² Var g) / (1 - γ²λ²), and Var g is Var x."""
    return ((1 - gamma**2) / (1 - (gamma * gae_lambda) ** 2 - (gamma * (1 - gae_lambda)) ** 2)) ** 0.5


def plot_shrinkage(jobs, path):
    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    grid, handles, rows = np.linspace(0, 1, 501), {}, []
    (handles["theory, lambda"],) = axis.plot(grid, shrinkage(grid), color="black")
    # BDPG's marks are small and full, PPO+QR's large and hollow: neither hides the other.
    for critic, target, marker in (("qr", "lambda", "s"), ("qr", "sr", "v"), ("bdpg", "lambda", "o"), ("bdpg", "sr", "^")):
        some = select(jobs, process="gaussian", critic=critic, target=target)
        points = sorted((job["gae_lambda"], *job["std_ratio"]) for job in some)
        style = dict(color=COLOURS[critic], marker=marker, ms=6, clip_on=False)
        style |= dict(ms=11, mfc="none", mew=1.5) if critic == "qr" else {}
        (handles[f"{NAMES[critic]}, {target}"],) = axis.plot(*np.reshape(points, (-1, 2)).T, ls="", **style)
        rows += [[critic, target, *point, 1.0 if target == "sr" else shrinkage(point[0])] for point in points]
    axis.set(xlabel="λ", ylabel="std of the model / of the return", ylim=(0, 1.3))
    save(path, ["critic", "target", "gae_lambda", "std_ratio", "theory"], rows, figure, handles)


def report(jobs, args):
    """Tables, figures and the data behind them."""
    plt.rcParams.update({"font.size": 13})  # legible at half the width
    folder = DOCS / "figures" if args.write else args.output
    measures = ("w1", "mean_error", "std_ratio", "coverage")
    rows = [[*(job[k] for k in KEYS), i, *(job[m][i] for m in measures)] for job in jobs for i in range(len(job["w1"]))]
    save(folder / "return_distributions", [*KEYS, "state", *measures], rows)
    text = tables = make_tables(jobs)
    of_density = "The law of one state of each process (conditional: state 4, else the first) and the critics' models of it,"
    of_density += " averaged over seeds; 0.95 is λ, and peaks above 1.6 times the law's are cut off"
    for plot, name, caption in (
        (plot_densities, "density", of_density),
        (plot_curves, "steps", "W1, averaged over states, against gradient steps"),
        (plot_shrinkage, "shrinkage", "Spread that is left of the gaussian process's return, a mark for each seed"),
    ):
        if plot == plot_densities and {job["critic"] for job in jobs} == {"scalar"}:
            continue  # it has none
        plot(jobs, folder / f"return_distributions_{name}")
        text += f"\n![{caption}](figures/return_distributions_{name}.png)\n"
        text += f"\n{caption} ([data](figures/return_distributions_{name}.csv)).\n"
    page = DOCS / "return_distributions.md" if args.write else args.output / "tables.md"
    if args.write:
        fill(page, "results", text)
    else:
        page.write_text(text.replace("figures/", ""))
    print(f"\n{tables}\nwrote {page}, figures and their data")


def main(args):
    if args.quick:
        args = replace(args, seeds=args.seeds[:1], processes=("uniform", "gaussian", "fork"), targets=("sr",), steps=3200)
    if args.steps < 160 or args.workers < 1 or not args.seeds:
        fail("--steps must be at least 160, --workers at least 1, and --seeds one number or more.")
    if not plan(args):
        fail(
            "none of these critics is trained with these targets: --targets lambda is for bdpg, and for qr on the gaussian process."
        )
    if args.write and (args.epochs, args.steps) != (Args.epochs, Args.steps):
        fail(f"docs/return_distributions.md is about --epochs {Args.epochs} --steps {Args.steps}; omit --write.")
    if args.output is None:
        args = replace(args, output=DOCS.parent / "benchmark/results/return_distributions" if args.write else DEFAULT_OUTPUT)
    make_folder(args.output)
    path = args.output / "jobs.jsonl"
    finished = select(load_jobs(path, (*KEYS, "version", "curve", "w1")), epochs=args.epochs, steps=args.steps)
    versions = {critic: version(critic) for critic in SCRIPTS}
    old = sum(job["version"] != versions[job["critic"]] for job in finished)
    if old:
        print(f"note: {old} of the jobs in {path} were done by another version of their script", file=sys.stderr)
    jobs = [job for job in plan(args) if not select(finished, **job)]
    print(f"{len(jobs)} jobs to do, {len(finished)} done before", flush=True)
    number, start_time = 0, time.time()
    for number, job in enumerate(run_jobs(run_job, jobs, args.workers, path), start=1):
        finished.append(job)
        label = " ".join(str(job[key]) for key in KEYS[:-2])
        left = (time.time() - start_time) / number * (len(jobs) - number) / 60
        print(f"{number}/{len(jobs)}  {label}: W1 {np.mean(job['w1']):.3f}, {left:.0f} min left", flush=True)
    if finished:
        report(finished, args)
    return int(number < len(jobs))


if __name__ == "__main__":
    start(main, Args, __doc__)
