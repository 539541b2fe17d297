"""Does the information gain point at the new? BDPG in mazes without reward, paid by different bonuses.

A point walks a serpentine from one end; what counts is how many of its 20 x 20 cells a run visits. Random network
distillation (RND) and visit counts, paid by the same code, show what a bonus that points at novelty gets; the same
bonuses shuffled within the batch show what noise of their size gets. The script is bdpg_mujoco.py: an arm is a list of
edits of its source (PARTS), each of which must fit exactly once.

    python studies/curiosity.py --workers 2                       # the main arms, 20 seeds; run it again to go on
    python studies/curiosity.py --arms candidates --mazes easy    # forms of the bonus, and their shuffled copies
    python studies/curiosity.py --arms gain+averaged+value        # any parts, joined by +
"""

import contextlib
import functools
import io
import json
import math
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import gymnasium as gym
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import PACKAGES, fail, load_jobs, make_folder, run_jobs, start, table, write_atomically

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bdpg_mujoco.py"
SIDE = 20  # cells along each side

# --- mazes ---
WALLS = {"easy": 3, "hard": 9}
MAZES = ("easy", "hard", "easy-goal")


class Maze(gym.Env):
    """A point in the unit square. Each wall leaves a gap at one end, at alternating sides; the way through is a snake.
    The action is a velocity. Only the goal, half-way along the second corridor, pays: 1, and ends the episode."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, walls, goal=False, speed=0.04, gap=0.2):
        self.speed, self.gap, self.goal = speed, gap, goal
        self.walls = [(i + 1) / (walls + 1) for i in range(walls)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.y = 0.025
        return np.array([self.x, self.y], np.float32), {}

    def step(self, action):
        dx, dy = action.tolist()
        x, y = min(max(self.x + self.speed * dx, 0.0), 1.0), min(max(self.y + self.speed * dy, 0.0), 1.0)
        for i, wall in enumerate(self.walls):
            if (self.y < wall) != (y < wall):
                crossing = self.x + (wall - self.y) / (y - self.y) * (x - self.x)
                if not (crossing > 1 - self.gap if i % 2 == 0 else crossing < self.gap):
                    y = wall - 1e-6 if self.y < wall else wall  # slides along the wall
        self.x, self.y = x, y
        at_goal = self.goal and y > self.walls[0] and x < 0.5
        return np.array([x, y], np.float32), float(at_goal), at_goal, False, {}


for name in MAZES:
    options = dict(walls=WALLS[name.removesuffix("-goal")], goal=name.endswith("-goal"))
    gym.register(f"Maze-{name}-v0", Maze, max_episode_steps=200, kwargs=options)

# --- arms ---
# The recipe is spelt out, so that other defaults of the script do not change the study; four epochs, as on Atari.
RECIPE = dict(num_envs=16, num_steps=256, gamma=0.99, gae_lambda=0.95, target="lambda", learning_rate=3e-4)
RECIPE |= dict(anneal_lr=True, update_epochs=4, minibatch_size=256, norm_adv=True, max_grad_norm=0.5)
RECIPE |= dict(log_std_init=0.0, eta=1.0, adversarial_interval=2, num_return_samples=8)

GAIN = "kl_divergence(q_x, q_g).sum(-1)"
G = "        self.generator = ConditionalMLP(args.latent_dim, state_dim, 1, hidden)"
UPDATE = "agent.u_stats.update(u.flatten())"
# Arguments, or edits (old, new) of the script's source.
PARTS = {
    "none": dict(eta=0.0),
    # What is paid. The information gain as the paper has it needs no edit.
    "gain": [],
    "RND": [(GAIN, "bench.rnd_error(obs)")],
    "counts": [(GAIN, "bench.inverse_root_counts()")],
    "averaged": [(GAIN, "kl_divergence(q_x, model.encode(samples, b, embeddings)).sum(-1).mean(0)")],
    "of-means": [
        (
            "q_x, q_g = model.encode(x_lambda, b, embeddings), model.encode(g, b, embeddings)",
            "g_mean, next_mean = samples.mean(0), next_samples.mean(0)\n"
            f"{' ' * 16}x_mean = k_step_gae(rewards, g_mean, next_mean, *gae) + g_mean\n"
            f"{' ' * 16}q_x, q_g = model.encode(x_mean, b, embeddings), model.encode(g_mean, b, embeddings)",
        )
    ],
    "disagreement": [
        (G, f"{G}\n{G.replace('generator', 'generator_2')}"),
        (
            f"{' ' * 16}losses = {{",
            f"{' ' * 16}z_pair = torch.stack([z_tilde, z_new]).detach()\n"
            f"{' ' * 16}second, g_2 = model.generator_2(z_pair, c).squeeze(-1)\n"
            f"{' ' * 16}return_loss = return_loss + F.mse_loss(second, mb_x)\n"
            f"{' ' * 16}second_energy = model.residual_scale * energy_distance(g_2, x_tilde, mb_x)\n"
            f"{' ' * 16}return_loss = return_loss + args.energy_coef * second_energy\n"
            f"{' ' * 16}losses = {{",
        ),
        (GAIN, "bench.disagreement(model, embeddings, args.num_return_samples)"),
    ],
    # How it is standardised: statistics of the batch itself and, with decay 0.8, of those before (the authors' code).
    "decay": [
        (UPDATE, "pass"),
        ("if iteration > 1:", f"agent.u_stats.count *= 0.8\n{' ' * 16}{UPDATE}\n{' ' * 16}if True:"),
    ],
    "no-mean": [("(u - agent.u_stats.mean)", "u")],
    # How it is paid.
    "not-at-ends": [("agent.u_stats.std).float()", "agent.u_stats.std * ~(terminations | truncations)).float()")],
    "value": [
        (
            "advantages = k_step_gae(policy_rewards,",
            "intrinsic = bench.intrinsic_advantages(policy_rewards - rewards, obs, next_obs, k_step_gae)\n"
            "            advantages = intrinsic + k_step_gae(rewards,",
        )
    ],
    "raw-advantages": dict(norm_adv=False),
    "eta-0.1": dict(eta=0.1),
    "eta-0.01": dict(eta=0.01),
    "authors-eta": dict(eta=1e-3 / math.sqrt(math.log(4) / 4)),
    # A Gaussian at its mode has no policy gradient, so nearly: a standard deviation of 2.5 % of the action range.
    "greedy": dict(log_std_init=-3.0),
    # The control: the same numbers, dealt out at random.
    "shuffled": [("clamp(max=args.u_bar)", f"clamp(max=args.u_bar)\n{' ' * 16}u = bench.shuffled(u)")],
}
ARMS = {"none": ("#000000", ":"), "gain": ("#0072B2", "-"), "gain+shuffled": ("#56B4E9", "--")}
ARMS |= {"RND": ("#D55E00", "-"), "counts": ("#009E73", "-")}
FORMS = ("decay", "not-at-ends", "raw-advantages", "eta-0.1", "eta-0.01", "authors-eta", "greedy")
FORMS += ("averaged", "of-means", "no-mean", "value", "raw-advantages+eta-0.1")
FORMS += ("decay+not-at-ends+raw-advantages+authors-eta", "averaged+value", "averaged+no-mean+value")
FORMS += ("averaged+decay+value",)
CANDIDATES = (*(f"gain+{form}" for form in FORMS), "disagreement", "disagreement+value")
# What every arm gets: a look at what is visited.
HOOKS = [
    ("observe(envs.reset()", "observe(bench.reset(envs)"),
    ("envs.step(action.cpu().numpy())", "bench.step(envs, action.cpu().numpy())"),
    ("# --- minibatch updates", f"bench.record(u if args.eta > 0 else None)\n{' ' * 8}# --- minibatch updates"),
]


def compile_arm(arm):
    """The script with the arm's edits as a module, and its arguments."""
    parts = [PARTS[part] for part in arm.split("+")]
    text = SCRIPT.read_text()
    for old, new in HOOKS + [edit for part in parts if isinstance(part, list) for edit in part]:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {SCRIPT.name} with the edits of {arm} before")
        text = text.replace(old, new)
    script = types.ModuleType("bdpg_mujoco_arm")
    script.__file__ = str(SCRIPT)
    exec(compile(text, f"{SCRIPT.name}, {arm}", "exec"), vars(script))
    return script, functools.reduce(dict.__or__, (part for part in parts if isinstance(part, dict)), dict(RECIPE))


def mlp(*sizes):
    layers = [module for pair in zip(sizes, sizes[1:], strict=False) for module in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Bench:
    """What a run visits, and what arms are paid in place of the gain. A bonus u is that of the state acted in."""

    def __init__(self):
        self.visits = np.zeros(SIDE**2, int)  # of each cell, up to the batch before
        self.path, self.steps, self.episodes = [], 0, []  # cells of this batch; (step, found the goal) of each episode
        self.covered, self.novelty, self.map = [], [], None

    def reset(self, envs):
        obs = envs.reset()
        self.here = cells(obs)
        return obs

    def step(self, envs, actions):
        self.path.append(self.here)
        outcome = obs, rewards, *_, ended = envs.step(actions)
        self.here, self.steps = cells(obs), self.steps + len(obs)
        self.episodes += [(self.steps, bool(found)) for found in rewards[ended] > 0]
        return outcome

    def record(self, u):
        """Closes a batch, of which u is the bonus of each step."""
        path = np.stack(self.path)
        if u is not None:
            u = u.double().numpy()
            self.novelty.append(novelty_correlation(u, path, self.visits))
            if len(self.novelty) == MAP_AT:
                in_batch = np.bincount(path.ravel(), minlength=SIDE**2)
                sums = np.bincount(path.ravel(), u.ravel(), SIDE**2)
                bonus = [float(f"{s / n:.4g}") if n else None for s, n in zip(sums, in_batch, strict=True)]
                self.map = {"visits": self.visits.tolist(), "bonus": bonus}
        self.visits = self.visits + np.bincount(path.ravel(), minlength=SIDE**2)
        self.covered.append(int((self.visits > 0).sum()))
        self.path = []

    def shuffled(self, u):
        return u.flatten()[torch.randperm(u.numel())].view_as(u)

    def inverse_root_counts(self):
        path = np.stack(self.path)
        counts = self.visits + np.bincount(path.ravel(), minlength=SIDE**2)
        return torch.tensor(1 / np.sqrt(counts[path]))

    @functools.cached_property
    def rnd(self):
        return mlp(2, 64, 64, 32), mlp(2, 64, 64, 32)

    def rnd_error(self, obs):
        """Of a network that learns from every batch what a random one says, before it has learnt from this one."""
        target, predictor = self.rnd
        truth = target(obs)
        error = (predictor(obs) - truth).square().mean(-1)
        self.fit("rnd", predictor, obs, truth, epochs=1)
        return error

    def disagreement(self, model, embeddings, num_samples):
        """How far two generators that were trained alike are apart in the mean, relative to the spread of returns."""
        z = model.prior(embeddings).sample((num_samples,))
        gap = (model.generator(z, embeddings) - model.generator_2(z, embeddings)).mean(0).abs().squeeze(-1)
        return gap / model.residual_scale

    @functools.cached_property
    def value(self):
        return mlp(2, 64, 64, 1)

    def intrinsic_advantages(self, bonus, obs, next_obs, k_step_gae, gamma=0.99, gae_lambda=0.95):
        """Of a value of the bonuses alone, which does not end with the episode."""
        values = 10 * self.value(torch.cat([obs, next_obs[None]])).squeeze(-1)  # a sum of bonuses is of this order
        never = torch.zeros_like(bonus, dtype=torch.bool)
        advantages = k_step_gae(bonus, values[:-1], values[1:], never, never, gamma, gae_lambda, len(bonus))
        self.fit("value", self.value, obs, (advantages + values[:-1]).unsqueeze(-1) / 10, epochs=10)
        return advantages

    @torch.enable_grad()
    def fit(self, name, network, inputs, targets, epochs):
        """Regression on the batch."""
        optimizer = self.__dict__.setdefault(f"{name}_optimizer", torch.optim.Adam(network.parameters(), 1e-3))
        inputs, targets = inputs.flatten(0, 1), targets.detach().flatten(0, 1)
        for _ in range(epochs):
            for rows in torch.randperm(len(inputs)).split(256):
                optimizer.zero_grad()
                F.mse_loss(network(inputs[rows]), targets[rows]).backward()
                optimizer.step()


def cells(positions):
    column, row = np.minimum((SIDE * positions).astype(int), SIDE - 1).T
    return SIDE * row + column


def ranks(values):
    """1 for the least; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def novelty_correlation(u, path, visits):
    """Spearman's, over the cells of a batch, of a cell's bonus with how rarely it was visited before. The bonus is a
    mean of ranks: of skewed numbers dealt out at random, a mean of few is mostly less than one of many."""
    seen, index, counts = np.unique(path, return_inverse=True, return_counts=True)
    bonus, rarity = ranks(np.bincount(index.ravel(), ranks(u.ravel())) / counts), ranks(-visits[seen])
    if bonus.std() == 0 or rarity.std() == 0:
        return None
    return round(float(np.corrcoef(bonus, rarity)[0, 1]), 4)


# --- runs ---
MAP_AT = 10  # the iteration of which a map is kept, of seed 1


@dataclass
class Args:
    arms: tuple[str, ...] = ("main",)
    """"main", "candidates" (each with its shuffled copy), or parts joined by +, such as gain+averaged+shuffled"""
    mazes: tuple[str, ...] = MAZES
    """easy-goal is the easy maze with a reward of 1 half-way along the second corridor; the others pay nothing"""
    seeds: tuple[int, ...] = tuple(range(1, 21))
    """of each arm"""
    total_timesteps: int = 30 * 4096
    """of each run"""
    workers: int = 1
    """runs at the same time, one thread each"""
    output: Optional[Path] = None
    """folder of finished.jsonl (what is in it is not run again), table.md and figures (default: runs/curiosity-study);
    results/curiosity goes on with the results that are in the repository"""


def run_job(job):
    """One run; returns the job with what it measured."""
    start_time = time.process_time()
    torch.set_num_threads(1)  # the workers have the cores
    script, arguments = compile_arm(job["arm"])
    script.bench = bench = Bench()
    arguments |= dict(env_id=f"Maze-{job['maze']}-v0", seed=job["seed"], total_timesteps=job["total_timesteps"])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                script.train(script.Args(cuda=False, envpool=False, run_dir=folder, save_every=10**6, **arguments))
        except SystemExit as stop:  # which would end a worker without a word
            raise RuntimeError(log.getvalue().strip()) from stop
        record = json.loads(next(Path(folder).glob("*/run.json")).read_text())
    found = [step for step, success in bench.episodes if success]
    known = [value for value in bench.novelty if value is not None]
    measured = {"covered": bench.covered, "novelty": float(np.mean(known)) if known else None}
    if job["maze"].endswith("-goal"):
        last = [success for _, success in bench.episodes[-20:]]
        measured |= {"first_found": found[0] if found else None, "success": sum(last) / max(1, len(last))}
    if job["seed"] == 1:
        measured["map"] = bench.map
    versions = {name: record["versions"][name] for name in PACKAGES if name in record["versions"]}
    hours = (time.process_time() - start_time) / 3600
    return job | measured | {"git": record["git"], "versions": versions, "hours": hours}


# --- report ---
def paired_p(differences):
    """Exact two-sided p-value of a mean, if every difference were as likely to have the other sign."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return float((np.abs(sums) >= abs(np.sum(differences)) - 1e-9).mean())


def mean_and_interval(values, resamples=10_000):
    """Mean over runs (the first dimension) and the ends of its 95 % bootstrap interval."""
    values = np.asarray(values, float)
    draws = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), resamples)
    return values.mean(0), *np.quantile(draws / len(values) @ values, (0.025, 0.975), axis=0)


def outcome(job):
    """What a run is judged by: cells visited, and with a goal the share of the run that was left when it was found."""
    if not job["maze"].endswith("-goal"):
        return job["covered"][-1]
    return 1 - (job["first_found"] or job["total_timesteps"]) / job["total_timesteps"]


def against(runs, others):
    """The p-value of a difference between two arms, over the seeds that both have."""
    differences = [outcome(runs[seed]) - outcome(others[seed]) for seed in sorted(runs.keys() & others.keys())[:20]]
    return f"{paired_p(differences):.2g}" if runs is not others and len(differences) > 1 else ""


def make_tables(runs):
    """Of every maze; runs[maze, arm] are its runs by seed."""
    text = ""
    for maze in dict.fromkeys(maze for maze, _ in runs):
        rows, with_goal = [], maze.endswith("-goal")
        for arm in [arm for other, arm in runs if other == maze]:
            mine = runs[maze, arm]
            mean, low, high = mean_and_interval([job["covered"][-1] for job in mine.values()])
            row = [arm, len(mine), f"{mean:.0f} ({low:.0f} to {high:.0f})"]
            if with_goal:
                found = [job["first_found"] for job in mine.values() if job["first_found"]]
                row += [len(found), f"{np.median(found):,.0f}" if found else ""]
                row += [f"{np.mean([job['success'] for job in mine.values()]):.2f}"]
            shuffled = (maze, f"{arm}+shuffled") if (maze, f"{arm}+shuffled") in runs else (maze, "gain+shuffled")
            row += [against(mine, runs.get(other, {})) for other in ((maze, "none"), shuffled)]
            known = [job["novelty"] for job in mine.values() if job["novelty"] is not None]
            rows.append([*row, f"{np.mean(known):.2f}" if known else ""])
        header = ["bonus", "seeds", f"cells visited, of {SIDE**2}"]
        header += ["found the goal", "their median step", "success in the end"] if with_goal else []
        header += ["p against none", "p against shuffled", "novelty correlation"]
        text += f"Maze: {maze}\n\n{table(header, rows)}\n"
    return text


def draw_curves(runs, path):
    """Cells visited, or runs that have found the goal, against steps; and the novelty correlation of every run."""
    mazes = [maze for maze in MAZES if any((maze, arm) in runs for arm in ARMS)]
    figure, axes = plt.subplots(1, len(mazes) + 1, figsize=(3.6 * (len(mazes) + 1), 3.9), layout="constrained")
    for maze, axis in zip(mazes, axes, strict=False):
        for arm, (colour, line_style) in ARMS.items():
            jobs = list(runs.get((maze, arm), {}).values())
            if not jobs:
                continue
            curves = np.array([job["covered"] for job in jobs], float)
            steps = jobs[0]["total_timesteps"] / curves.shape[1] * np.arange(1, curves.shape[1] + 1)
            if maze.endswith("-goal"):
                curves = np.array([steps >= (job["first_found"] or np.inf) for job in jobs], float)
            mean, low, high = mean_and_interval(curves)
            axis.plot(steps / 1000, mean, line_style, color=colour, lw=2, label=arm)
            axis.fill_between(steps / 1000, low, high, color=colour, alpha=0.15, lw=0)
        ylabel = "share of runs that found the goal" if maze.endswith("-goal") else f"cells visited, of {SIDE**2}"
        axis.set(title=f"{maze} maze".replace("-goal maze", " maze with a goal"), xlabel="agent steps (thousands)")
        axis.set(ylabel=ylabel, ylim=(0, None))
    handles, labels = axes[0].get_legend_handles_labels()
    for i, (arm, (colour, _)) in enumerate(ARMS.items()):
        known = [job["novelty"] for job in runs.get((mazes[0], arm), {}).values() if job["novelty"] is not None]
        axes[-1].plot(np.linspace(i - 0.2, i + 0.2, len(known)), known, ".", color=colour)
    axes[-1].axhline(0, color="0.7", lw=1)
    axes[-1].set(title=f"{mazes[0]} maze", ylabel="novelty correlation, one dot a run", xlim=(0.5, len(ARMS) - 0.5))
    axes[-1].set_xticks(range(1, len(ARMS)), [arm.replace("+", "\n") for arm in list(ARMS)[1:]])
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ARMS))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_maps(runs, path):
    """Where the bonus of one batch lies, beside what had been visited before it."""
    jobs = [mine[1] for (maze, _), mine in runs.items() if 1 in mine and mine[1].get("map") and "goal" not in maze]
    jobs = [job for job in jobs if job["maze"] == jobs[0]["maze"] and job["arm"] in ("gain", "RND", "counts")]
    if not jobs:
        return
    figure, axes = plt.subplots(2, len(jobs), figsize=(3.2 * len(jobs), 6.2), squeeze=False, layout="constrained")
    for job, (above, below) in zip(jobs, axes.T, strict=True):
        visits, bonus = (np.array(job["map"][name], float).reshape(SIDE, SIDE) for name in ("visits", "bonus"))
        above.imshow(np.where(visits, np.log10(np.maximum(visits, 1)), np.nan), origin="lower", extent=(0, 1, 0, 1))
        ranked = np.full(bonus.shape, np.nan)
        ranked[~np.isnan(bonus)] = ranks(bonus[~np.isnan(bonus)])
        below.imshow(ranked, origin="lower", extent=(0, 1, 0, 1), cmap="magma")
        above.set_title(f"{job['arm']}: visits before (log)")
        below.set_title("rank of the mean bonus")
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
            walls = WALLS[job["maze"]]
            for i in range(walls):
                axis.axhline((i + 1) / (walls + 1), *((0, 0.8) if i % 2 == 0 else (0.2, 1)), color="0.5", lw=1.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(jobs, folder):
    jobs = sorted(jobs, key=lambda job: (MAZES.index(job["maze"]), job["seed"]))
    runs = {}
    for arm in [*ARMS, *dict.fromkeys(job["arm"] for job in jobs if job["arm"] not in ARMS)]:
        for job in (job for job in jobs if job["arm"] == arm):
            runs.setdefault((job["maze"], arm), {})[job["seed"]] = job
    made_with = [f"commit `{git and git[:7]}`" for git in dict.fromkeys(job["git"] for job in jobs)]
    made_with += dict.fromkeys(", ".join(f"{n} {version}" for n, version in job["versions"].items()) for job in jobs)
    made_with += [f"{sum(job['hours'] for job in jobs):.1f} hours of one core"]
    text = "p: exact, two-sided, paired by seed; shuffled: the bonus's own shuffled copy, or else that of the gain.\n\n"
    text += f"{make_tables(runs)}{jobs[0]['total_timesteps']:,} steps a run; {'; '.join(made_with)}.\n"
    write_atomically(folder / "table.md", text)
    if any((maze, arm) in runs for maze in MAZES for arm in ARMS):
        draw_curves(runs, folder / "curves.png")
    draw_maps(runs, folder / "maps.png")
    print(f"{text}\nwrote {folder / 'table.md'} and figures beside it")


def main(args):
    if args.workers < 1 or not args.seeds or not args.mazes or not args.arms:
        fail("--workers must be at least 1, and --arms, --mazes and --seeds one or more.")
    unknown = [maze for maze in args.mazes if maze not in MAZES]
    if unknown:
        fail(f"{unknown[0]} is none of this study's mazes, which are {', '.join(MAZES)}.")
    sets = {"main": ARMS, "candidates": [form + end for form in CANDIDATES for end in ("", "+shuffled")]}
    arms = dict.fromkeys(arm for name in args.arms for arm in sets.get(name, [name]))
    for arm in arms:
        if not set(arm.split("+")) <= PARTS.keys():
            fail(f"{arm} is not made of this study's parts, which are {', '.join(PARTS)}.")
        script, arguments = compile_arm(arm)
    for seed in args.seeds:
        script.check_args(script.Args(seed=seed, total_timesteps=args.total_timesteps, **arguments))
    folder = args.output or Path("runs/curiosity-study")
    make_folder(folder)
    settings = {"total_timesteps": args.total_timesteps}
    jobs = [
        dict(maze=maze, arm=arm, seed=seed) | settings
        for seed in dict.fromkeys(args.seeds)
        for maze in dict.fromkeys(args.mazes)
        for arm in arms
    ]
    # Also arms, mazes and seeds that are not asked for now: the report is of all that is there.
    keys = ("maze", "arm", "seed", "total_timesteps", "covered", "novelty", "git", "versions", "hours")
    done = [job for job in load_jobs(folder / "finished.jsonl", keys) if settings.items() <= job.items()]
    jobs = [job for job in jobs if not any(job.items() <= other.items() for other in done)]
    print(f"{len(jobs)} runs to do, {len(done)} done before", flush=True)
    number = 0
    for number, job in enumerate(run_jobs(run_job, jobs, args.workers, folder / "finished.jsonl"), start=1):
        done.append(job)
        name = f"{job['maze']}, {job['arm']}, seed {job['seed']}"
        print(f"{number}/{len(jobs)}  {name}: {job['covered'][-1]} cells", flush=True)
    if done:
        report(done, folder)
    return int(number < len(jobs))


if __name__ == "__main__":
    start(main, Args, __doc__)
