"""Do the critics learn the return's distribution? Markov reward processes whose returns have known distributions.

The scripts' own train() runs, with their defaults; only the environment is replaced, and the policy rests. Observations
are a fixed random feature of the state. Nothing is normalised: the returns have a scale of about 1.

    python studies/return_distributions.py --quick                # one seed, three processes, 3,200 gradient steps
    python studies/return_distributions.py --workers 2 --write    # all, hours; run it again to go on
"""

import ast
import contextlib
import csv
import hashlib
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Optional
from unittest import mock

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium.spaces import Box
from torch.distributions import kl_divergence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bdpg_mujoco as bdpg
import ppo_mujoco as scalar
import ppo_qr_mujoco as qr
import ppo_wgan_mujoco as wgan
from benchmark.common import fail, load_jobs, make_folder, run_jobs, start, table

SCRIPTS = {"bdpg": bdpg, "wgan": wgan, "qr": qr, "scalar": scalar}
NAMES = {"bdpg": "BDPG", "wgan": "PPO+WGAN", "qr": "PPO+QR", "scalar": "PPO"}
COLOURS = {"bdpg": "#0072B2", "wgan": "#D55E00", "qr": "#009E73", "scalar": "#000000"}  # Okabe and Ito
# The targets (name, λ) each critic is trained with. At λ = 0 and λ = 1 "sr" and "lambda" are the same target.
TARGETS = {
    "bdpg": [("sr", 0.95), ("lambda", 0.95), ("lambda", 0.0), ("lambda", 1.0)],
    "wgan": [("sr", 0.95)],
    "qr": [("sr", 0.95)],
    "scalar": [("sr", 0.95)],
}
# On the gaussian process the fastest critic has more of them, to show how "lambda" shrinks the distribution.
SWEEP = [("lambda", value) for value in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)]
SWEEP += [("sr", value) for value in (0.5, 0.8, 0.9, 0.98)]
KEYS = ("critic", "process", "target", "gae_lambda", "seed", "epochs", "steps")  # of a job
NUM_SAMPLES, NUM_FEATURES, END = 4096, 8, -1
RESULTS = Path(__file__).resolve().parent.parent / "results" / "return_distributions"


# --- reward processes ---

root2 = 2**0.5
# Distributions with mean 0 and standard deviation 1: the distribution function, and n draws.
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
    """A Markov reward process, and the distribution of the discounted return from each of its states."""

    gamma: float
    step: Callable  # states -> rewards, next states (END where the episode terminates)
    cdf: Callable  # (n, states) -> (n, states), the distribution function of each state's return
    mean: torch.Tensor
    std: torch.Tensor
    start: torch.Tensor  # episodes start in one of these states, all with the same chance
    shown: int = 0  # the state in the figure
    modes: tuple = ()  # of the shown state's distribution: (from, to, probability) of each

    @cached_property
    def features(self):
        return torch.randn(len(self.mean), NUM_FEATURES, generator=torch.Generator().manual_seed(7))

    def invert(self, levels):
        """The quantile of each state's returns at levels (n, states): the least y with cdf(y) >= level."""
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


def mixture(distributions, gamma, step, start, **rest):
    """A process whose distributions are mixtures: for each state a list of (weight, shape, mean, std)."""

    def cdf(y):
        return torch.stack(
            [
                sum(w * SHAPES[s][0]((y[:, i] - m) / std) for w, s, m, std in distribution)
                for i, distribution in enumerate(distributions)
            ],
            1,
        )

    mean = torch.tensor(
        [sum(w * m for w, _, m, _ in distribution) for distribution in distributions], dtype=torch.float64
    )
    square = torch.tensor(
        [sum(w * (m * m + std * std) for w, _, m, std in distribution) for distribution in distributions],
        dtype=torch.float64,
    )
    return Process(gamma, step, cdf, mean, (square - mean**2).sqrt(), torch.tensor(start), **rest)


def stationary(shape, mean, std, gamma, reward):
    """One state for ever, and rewards such that the return has the given distribution."""
    return mixture([[(1, shape, mean, std)]], gamma, lambda states: (reward(len(states)), states), [0])


def self_decomposable(shape, mean, std, p_zero, gamma=0.99):
    """G = r + γ G' in distribution, where r is 0 with probability p_zero and else has the distribution of G itself.

    For Exp(1), with the characteristic function φ(t) = 1 / (1 - it), φ(t) / φ(γt) is (1 - iγt) / (1 - it)
    = γ + (1 - γ) φ(t); for Laplace, φ(t) = 1 / (1 + t²), it is (1 + γ²t²) / (1 + t²) = γ² + (1 - γ²) φ(t)."""
    return stationary(shape, mean, std, gamma, lambda n: (torch.rand(n) >= p_zero) * (mean + std * SHAPES[shape][1](n)))


def tree(rewards, branches, start, gamma=0.99, **rest):
    """States that lead to later ones only: (shape, mean, std) of each reward, and (p, next, other next) or the end.

    A state's distribution is the mixture of its branches', shifted, shrunk and blurred by the reward. That is exact
    where the reward is fixed, or where it and all that follows is normal."""
    distributions = [[] for _ in rewards]
    for i, (shape, mean, std) in reversed(list(enumerate(rewards))):
        p, *following = branches[i]
        for chance, j in zip((p, 1 - p), following, strict=True):
            distributions[i] += [
                (chance * w, s, mean + gamma * m, (std**2 + (gamma * d) ** 2) ** 0.5)
                for w, s, m, d in distributions[j]
                if j != END
            ]
        distributions[i] = distributions[i] or [(1, shape, mean, std)]
    which = torch.tensor([list(SHAPES).index(shape) for shape, _, _ in rewards])
    means, stds = torch.tensor([reward[1:] for reward in rewards]).T
    p_first, first, second = torch.tensor(branches).T

    def step(states):
        draws = torch.stack([draw(len(states)) for _, draw in SHAPES.values()])
        pay = means[states] + stds[states] * draws.gather(0, which[states].unsqueeze(0))[0]
        return pay, torch.where(torch.rand(states.shape) < p_first[states], first[states], second[states]).long()

    return mixture(distributions, gamma, step, start, **rest)


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
    """24 states, no two distributions alike: 12 pay a reward of one of six shapes and end, 12 pay a fixed reward and
    lead to one of two of those, which gives mixtures."""
    uniform = torch.rand(4, leaves, generator=torch.Generator().manual_seed(7))
    means, stds = (4 * uniform[0] - 2).tolist(), (0.15 * (1 / 0.15) ** uniform[1]).tolist()
    rewards = [("normal", fixed, 0.0) for fixed in (2 * uniform[2] - 1).tolist()]
    rewards += [(list(SHAPES)[i % len(SHAPES)], means[i], stds[i]) for i in range(leaves)]
    branches = [(p, leaves + i, leaves + (i + 5) % leaves) for i, p in enumerate((0.2 + 0.6 * uniform[3]).tolist())]
    return tree(rewards, branches + [(1, END, END)] * leaves, list(range(2 * leaves)), shown=4)


def geometric(gamma=0.99, p=0.5):
    """A reward of 1 a step, and the end with probability p: the return (1 - γ^n) / (1 - γ) has atoms, n = 1, 2, ..."""

    def cdf(y):
        steps = torch.floor(torch.log((1 - (1 - gamma) * y).clamp(min=1e-9)) / np.log(gamma) + 1e-9)
        return 1 - (1 - p) ** steps.clamp(min=0)

    def step(states):
        return torch.ones(states.shape), torch.where(torch.rand(states.shape) < p, END, states)

    power, square = (p * x / (1 - (1 - p) * x) for x in (gamma, gamma**2))  # E[γ^n] and E[γ^2n]
    mean, std = (1 - power) / (1 - gamma), (square - power**2) ** 0.5 / (1 - gamma)
    return Process(gamma, step, cdf, torch.tensor([mean]).double(), torch.tensor([std]).double(), torch.tensor([0]))


PROCESSES = {
    "uniform": stationary(
        "uniform", 1, 3**-0.5, 0.5, lambda n: torch.randint(2, (n,)).float()
    ),  # binary digits of U[0, 2]
    "exponential": self_decomposable("exponential", 1, 1, p_zero=0.99),
    "laplace": self_decomposable("laplace", 0, root2, p_zero=0.99**2),
    "gaussian": stationary("normal", 0, 1, 0.99, lambda n: (1 - 0.99**2) ** 0.5 * torch.randn(n)),
    "chain": chain(),
    "fork": fork(),
    "geometric": geometric(),
    "conditional": conditional(),
}


# --- training by the scripts ---


def version(critic):
    """Of the script without comments, to tell finished jobs of an older one."""
    source = ast.dump(ast.parse(Path(SCRIPTS[critic].__file__).read_text()))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def default_args(critic, epochs=1, **rest):
    """The script's own. A rollout has as many gradient steps as there; with fewer passes over it, it has more
    environments instead."""
    args = SCRIPTS[critic].Args(cuda=False, save_every=10**9, **rest)
    return replace(args, update_epochs=epochs, num_envs=args.num_envs * args.update_epochs // epochs)


def steps_per_iteration(args):
    return args.update_epochs * args.num_envs * args.num_steps // args.minibatch_size


def train_on(process, critic, args, steps, on_iteration=lambda iteration, agent: None):
    """The agent that the script's train() makes of a process with some `steps` gradient steps."""
    script, agents = SCRIPTS[critic], []

    class Environments:
        """The process in the place of the task; whatever the action, it goes on."""

        observation_space, action_space = Box(-np.inf, np.inf, (NUM_FEATURES,)), Box(-1, 1, (1,))

        def __init__(self, args, seed):
            self.states, self.steps = process.start[torch.randint(len(process.start), (args.num_envs,))], 0

        def reset(self):
            return process.features[self.states].numpy()

        def step(self, actions):
            if self.steps % args.num_steps == 0 and self.steps > 0:
                on_iteration(self.steps // args.num_steps, agents[0])
            rewards, states = process.step(self.states)
            ended = states == END
            starts = process.start[torch.randint(len(process.start), states.shape)]
            self.states, self.steps = torch.where(ended, starts, states), self.steps + 1
            obs, no = self.reset(), np.zeros(len(states), dtype=bool)
            return obs, rewards.numpy(), ended.numpy(), no, obs, no  # to log all these episodes would take long

    def make_agent(envs, args, make=script.Agent):
        agents.append(make(envs, args))
        return agents[0]

    changes = {"Environments": Environments, "Agent": make_agent}
    changes["ppo_loss"] = lambda *given: (torch.zeros(()), {})  # the policy rests
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(script, **changes))
        stack.enter_context(mock.patch.object(script.RunningMeanStd, "update"))  # nothing is normalised
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        args = replace(args, run_dir=stack.enter_context(tempfile.TemporaryDirectory()))
        args.total_timesteps = steps // steps_per_iteration(args) * args.num_envs * args.num_steps
        return script.train(args).requires_grad_(False)


def train(critic, process, target, gae_lambda, seed, epochs, steps):
    """The agent after `steps` gradient steps on a process, and its W1 on the way there, as [[step, W1], ...]."""
    args = default_args(critic, epochs, target=target, gae_lambda=gae_lambda, seed=seed)
    curve = []

    def measure_w1(iteration, agent):
        if iteration in (1, 2, 5) or iteration % 10 == 0 or iteration == steps // steps_per_iteration(args):
            w1 = w1_distance(sample_returns(agent, process), process).mean().item()
            curve.append([iteration * steps_per_iteration(args), w1])

    agent = train_on(process, critic, args, steps, measure_w1)
    measure_w1(steps // steps_per_iteration(args), agent)
    return agent, curve


# --- measures ---


def sample_returns(agent, process, num_samples=NUM_SAMPLES):
    """Returns (num_samples, states) as the agent believes them to be; PPO has one for each state."""
    with torch.no_grad():
        c = agent.trunk(process.features)
        if hasattr(agent, "value"):
            return agent.value(c).squeeze(-1).expand(num_samples, -1).double()
        return agent.return_model.sample(c, num_samples).double()


def w1_distance(samples, process):
    """Wasserstein-1 distance of sampled returns (NUM_SAMPLES, states) from the true ones, in units of their std."""
    return (samples.sort(0).values - process.quantiles).abs().mean(0) / process.std


def measure(samples, process):
    """Per state: W1, error of the mean, ratio of standard deviations, share of true returns in the central 80 %."""
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
    """BDPG's encoder on true returns x, averaged over states: RMS of x - G(z̃, s) in units of x's std, mean and std of z̃
    less the prior's mean, and information gains (capped as in the script), also of x + 3 std, hardly ever seen."""
    model, c = agent.return_model, agent.trunk(process.features)
    b, x = model.centre(c), process.draw(NUM_SAMPLES).float()
    q_x = model.encode(x, b, c)
    z_tilde = q_x.sample()
    misses, latents = x - model.generate(z_tilde, c), z_tilde - model.prior_mean(c)
    q_g, q_unseen = model.encode(model.sample(c, NUM_SAMPLES), b, c), model.encode(x + 3 * process.std.float(), b, c)
    gains = [kl_divergence(q, q_g).sum(-1).clamp(max=bdpg.Args.u_bar) for q in (q_x, q_unseen)]
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
    return json.loads(
        json.dumps(job | results), parse_float=lambda text: float(f"{float(text):.5g}")
    )  # short lines in the file


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
    runs/return_distributions; with --write results/return_distributions)"""
    write: bool = False
    """go on with the results that are in the repository"""


def plan(args):
    """The jobs, first those with the target that all critics have, seed by seed: one that is cut short has tables."""
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
    cells = [
        ["" if cell != cell else f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in rows
    ]
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
        worst_w1, worst_mean, worst_modes = (
            over_states(everything, m, np.max) for m in ("w1", "mean_error", "mode_errors")
        )
        number = f"{len({job['process'] for job in everything})}, {len(everything)}"
        summary.append([label, number, w1, worst_w1, mean, worst_mean, std, coverage, worst_modes, round(seconds)])
    for name in names:
        torch.manual_seed(0)
        floor = w1_distance(PROCESSES[name].draw(NUM_SAMPLES), PROCESSES[name]).mean().item()
        own = [select(jobs, process=name, **variant) for variant in columns.values()]
        cells = [
            f"{over_states(some, 'w1', np.mean):.3f} ({over_states(some, 'w1', np.max):.2f})" if some else ""
            for some in own
        ]
        by_process.append([name, len(PROCESSES[name].mean), floor, *cells])
        some = select(jobs, process=name, critic="bdpg", target="sr", gae_lambda=0.95)
        inference += [[name, *(over_states(some, measure, np.mean) for measure in INFERENCE)]] if some else []
    seeds, epochs = ", ".join(map(str, sorted({job["seed"] for job in jobs}))), jobs[0]["epochs"]
    header = "critic, target λ|processes, jobs|W1|worst|error of mean|worst|std, model / true|coverage of 80 %"
    header += "|worst error of modes|CPU seconds"
    return "\n".join(
        [
            f"{len(jobs)} jobs: {jobs[0]['steps']:,} gradient steps, passes over a rollout: {epochs}, seeds {seeds}.\n",
            markdown("Mean over processes, and the worst state of any process and seed:", header.split("|"), summary),
            markdown("W1 by process (and its worst state):", ["process", "states", "floor", *columns], by_process),
            markdown(
                "Inference of BDPG with target sr:",
                ["process", *(name.replace("_", " ") for name in INFERENCE)],
                inference,
            ),
        ]
    )


def save(path, header, rows, figure=None, handles=None):
    """The data, and a figure of it with the legend below its panels."""
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        cells = [[f"{value:.5g}" if isinstance(value, float) else value for value in row] for row in rows]
        csv.writer(file).writerows([header, *cells])
    if figure:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=int(figure.get_figwidth() // 2.5),
            frameon=False,
        )
        figure.savefig(path.with_suffix(".png"), dpi=130)
        plt.close(figure)


def plot_densities(jobs, path):
    """The distribution of one state of each process, and what the critics make of it (all seeds together)."""
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
                rows += [
                    [name, label, *values] for values in np.stack([edges[:-1], edges[1:], truth, model], 1).tolist()
                ]
            axes[-1, j].set_xlabel("return")
            axes[0, j].set_title(NAMES[critic])
        axes[i, 0].set(ylabel=name, ylim=(0, 1.6 * (truth / width).max()), yticks=[])  # a peak above that is cut off
    figure.supylabel("probability density", fontsize="medium")
    save(path, ["process", "critic", "from", "to", "truth", "model"], rows, figure, handles)


def plot_curves(jobs, path):
    names = [name for name in PROCESSES if select(jobs, process=name)]
    height = (len(names) + 1) // 2
    figure, axes = plt.subplots(
        height, 2, figsize=(8.5, 1 + 2 * height), squeeze=False, sharex=True, layout="constrained"
    )
    handles, rows = {}, []
    for name, axis in zip(names, axes.flat, strict=False):
        for label, variant in variants(select(jobs, process=name, target="sr")).items():
            curves = np.array([job["curve"] for job in select(jobs, process=name, **variant)])
            steps, w1, colour = curves[0, :, 0], curves[:, :, 1], COLOURS[variant["critic"]]
            (handles[label],) = axis.plot(steps, w1.mean(0), color=colour)
            axis.fill_between(steps, w1.min(0), w1.max(0), color=colour, alpha=0.2, lw=0)
            rows += [
                [name, label, *values] for values in np.stack([steps, w1.mean(0), w1.min(0), w1.max(0)], 1).tolist()
            ]
        axis.set(title=name, xscale="log", yscale="log", ylim=(0.01, 3))
    for axis in axes[-1]:
        axis.set_xlabel("gradient steps")
    figure.supylabel("W1 in std of the distribution; mean and range of seeds", fontsize="medium")
    save(path, ["process", "critic", "step", "w1", "least", "most"], rows, figure, handles)


def shrinkage(gae_lambda, gamma=0.99):
    """The std of what the target "lambda" converges to over that of the return, for independent rewards of variance σ².

    x_t = r_t + γ ((1-λ) g_{t+1} + λ x_{t+1}), all independent, so that Var x = (σ² + γ²(1-λ)² Var g) / (1 - γ²λ²), and
    Var g is Var x."""
    return ((1 - gamma**2) / (1 - (gamma * gae_lambda) ** 2 - (gamma * (1 - gae_lambda)) ** 2)) ** 0.5


def plot_shrinkage(jobs, path):
    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    grid, handles, rows = np.linspace(0, 1, 501), {}, []
    (handles["theory, lambda"],) = axis.plot(grid, shrinkage(grid), color="black")
    # BDPG's marks are small and full, PPO+QR's large and hollow: neither hides the other.
    for critic, target, marker in (
        ("qr", "lambda", "s"),
        ("qr", "sr", "v"),
        ("bdpg", "lambda", "o"),
        ("bdpg", "sr", "^"),
    ):
        some = select(jobs, process="gaussian", critic=critic, target=target)
        points = sorted((job["gae_lambda"], *job["std_ratio"]) for job in some)
        style = dict(color=COLOURS[critic], marker=marker, ms=6, clip_on=False)
        style |= dict(ms=11, mfc="none", mew=1.5) if critic == "qr" else {}
        (handles[f"{NAMES[critic]}, {target}"],) = axis.plot(*np.reshape(points, (-1, 2)).T, ls="", **style)
        rows += [[critic, target, *point, 1.0 if target == "sr" else shrinkage(point[0])] for point in points]
    axis.set(xlabel="λ", ylabel="std of the model / of the return", ylim=(0, 1.3))
    save(path, ["critic", "target", "gae_lambda", "std_ratio", "theory"], rows, figure, handles)


def report(jobs, folder):
    """Tables, figures and the data behind them."""
    plt.rcParams.update({"font.size": 13})  # legible at half the width
    measures = ("w1", "mean_error", "std_ratio", "coverage")
    rows = [[*(job[k] for k in KEYS), i, *(job[m][i] for m in measures)] for job in jobs for i in range(len(job["w1"]))]
    save(folder / "states", [*KEYS, "state", *measures], rows)
    text = tables = make_tables(jobs)
    of_density = "The return's distribution in one state of each process (conditional: state 4, else the first) and the"
    of_density += (
        " critics' models of it, averaged over seeds; λ is 0.95, and peaks above 1.6 times the true one's are cut off"
    )
    for plot, name, caption in (
        (plot_densities, "density", of_density),
        (plot_curves, "steps", "W1, averaged over states, against gradient steps"),
        (plot_shrinkage, "shrinkage", "Spread that is left of the gaussian process's return, a mark for each seed"),
    ):
        if plot != plot_densities or {job["critic"] for job in jobs} != {"scalar"}:  # which has none
            plot(jobs, folder / name)
            text += f"\n![{caption}]({name}.png)\n\n{caption} ([data]({name}.csv)).\n"
    (folder / "tables.md").write_text(text)
    print(f"\n{tables}\nwrote {folder / 'tables.md'}, figures and their data")


def main(args):
    if args.quick:
        args = replace(
            args, seeds=args.seeds[:1], processes=("uniform", "gaussian", "fork"), targets=("sr",), steps=3200
        )
    if args.steps < 160 or args.workers < 1 or not args.seeds:
        fail("--steps must be at least 160, --workers at least 1, and --seeds one number or more.")
    if not plan(args):
        fail(
            "none of these critics has these targets: --targets lambda is for bdpg, and for qr on the gaussian process."
        )
    if args.write and (args.epochs, args.steps) != (Args.epochs, Args.steps):
        fail(f"{RESULTS} is about --epochs {Args.epochs} --steps {Args.steps}; omit --write.")
    if args.output is None:
        args = replace(args, output=RESULTS if args.write else Path("runs/return_distributions"))
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
        report(finished, args.output)
    return int(number < len(jobs))


if __name__ == "__main__":
    start(main, Args, __doc__)
