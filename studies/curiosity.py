"""Does the information gain help to explore? BDPG with it, without it, and with the same bonuses dealt out at random.

In the shuffled arm the gains of an iteration are permuted among its steps: their size, schedule and normalisation stay,
but not where they are paid. If curiosity beats that, it is by what it points at, not by the noise it adds.

    python studies/curiosity.py --workers 2     # 2 tasks x 3 arms x 10 seeds; run it again to go on
"""

import contextlib
import csv
import functools
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional
from unittest import mock

import gymnasium as gym
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bdpg_mujoco as bdpg
from benchmark.common import PACKAGES, fail, load_jobs, make_folder, read_events, run_jobs, start, table

ROOT = Path(__file__).resolve().parent.parent
# A return above this means that the goal was reached.
GOALS = {"MountainCarContinuous-v0": 0.0, "SparsePendulum-v0": 0.0}
ARMS = {"no curiosity": ("#000000", ":"), "information gain": ("#0072B2", "-"), "shuffled gain": ("#D55E00", "--")}


class Sparse(gym.Wrapper):
    """Pendulum that starts hanging and pays 1 for each step within 15 degrees of upright, and nothing else."""

    def reset(self, *, seed=None, options=None):
        _, info = self.env.reset(seed=seed, options=options)
        self.unwrapped.state = np.array([np.pi, 0.0]) + self.unwrapped.np_random.uniform(-0.1, 0.1, 2)
        return self.unwrapped._get_obs(), info

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(obs[0] > np.cos(np.pi / 12)), terminated, truncated, info


def sparse_pendulum(**options):
    return Sparse(gym.make("Pendulum-v1", **options).unwrapped)


gym.register("SparsePendulum-v0", sparse_pendulum, max_episode_steps=200)


@dataclass
class Args:
    envs: tuple[str, ...] = tuple(GOALS)
    """tasks in which reward is far away"""
    seeds: tuple[int, ...] = tuple(range(1, 11))
    """of each arm"""
    eta: float = 1.0
    """curiosity coefficient η of the two arms that have one"""
    total_timesteps: int = 200_000
    """of each run"""
    workers: int = 1
    """runs at the same time, one thread each"""
    output: Optional[Path] = None
    """folder of finished.jsonl (what is in it is not run again), curiosity.md, .png and .csv, and of the runs (default:
    runs/curiosity-study; with --write results/curiosity, which is in the repository but for the runs)"""
    write: bool = False
    """go on with the results that are in the repository"""


def shuffled(gains):
    """The gains (steps, environments, latent dimensions) in another order; those of a step stay together."""
    flat = gains.flatten(0, 1)
    return flat[torch.randperm(len(flat))].view_as(gains)


def run_job(job, folder):
    """One run; returns the job with the return of every episode and the step at which it ended."""
    start_time, kl_divergence = time.process_time(), bdpg.kl_divergence
    torch.set_num_threads(1)  # the workers have the cores
    is_shuffled = job["arm"] == "shuffled gain"
    gains = (lambda *given: shuffled(kl_divergence(*given))) if is_shuffled else kl_divergence
    folder = folder / "runs" / job["arm"].replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(
        tempfile.mkdtemp(dir=folder, prefix=f"{job['env']}-{job['seed']}-")
    )  # an interrupted run may have left one
    with open(folder / "log.txt", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            with mock.patch.object(bdpg, "kl_divergence", gains):
                bdpg.train(script_args(job, run_dir=str(folder)))
        except SystemExit as stop:  # which would end a worker without a word
            raise RuntimeError(f"{folder / 'log.txt'} says why") from stop
    (run_dir,) = folder.glob("*__bdpg_mujoco__*")
    record = json.loads((run_dir / "run.json").read_text())
    record["args"]["arm"] = job["arm"]  # or plot.py would take the shuffled arm for the other
    (run_dir / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    episodes = [(step, float(f"{value:.5g}")) for step, value in read_events(run_dir)["charts/episodic_return"]]
    versions = {name: record["versions"][name] for name in PACKAGES}
    hours = (time.process_time() - start_time) / 3600
    return job | {"episodes": episodes, "git": record["git"], "versions": versions, "hours": hours}


def script_args(job, **rest):
    eta = 0.0 if job["arm"] == "no curiosity" else job["eta"]
    names = {"env_id": job["env"], "seed": job["seed"], "total_timesteps": job["total_timesteps"]}
    return bdpg.Args(eta=eta, cuda=False, **names, **rest)


def curve(job, grid):
    """Mean return of the last 20 episodes before each step of the grid; nan before the first episode."""
    steps, returns = np.array(job["episodes"]).T
    counts = np.searchsorted(steps, grid, side="right")
    return np.array([np.mean(returns[max(0, n - 20) : n]) if n else np.nan for n in counts])


def mean_and_interval(curves, resamples=10_000):
    """Mean over runs at each step, and the ends of its 95 % bootstrap interval (mean ± std would reach past the best
    score that is possible, since a run either finds the goal or does not)."""
    draws = np.random.default_rng(0).integers(len(curves), size=(resamples, len(curves)))
    shares = np.stack([(draws == run).mean(1) for run in range(len(curves))], 1)  # of each run in each redrawn set
    return curves.mean(0), *np.quantile(shares @ curves, (0.025, 0.975), axis=0)


def report(jobs, args):
    """A table and a figure of what is finished, and the curves behind them."""
    grid = np.linspace(0, args.total_timesteps, 101)[1:]
    envs = [env for env in GOALS if any(job["env"] == env for job in jobs)]
    plt.rcParams.update({"font.size": 13, "axes.titlesize": "medium"})
    figure, axes = plt.subplots(1, len(envs), figsize=(1 + 3.6 * len(envs), 3.8), squeeze=False, layout="constrained")
    header = [
        "task",
        "arm",
        "seeds",
        "return, last 20 episodes",
        "reached the goal",
        "their median step",
        "still there",
    ]
    rows, lines = [], []
    for env, axis in zip(envs, axes[0], strict=True):
        for arm, (colour, line_style) in ARMS.items():
            runs = [job for job in jobs if job["env"] == env and job["arm"] == arm]
            if not runs:
                continue
            curves = np.array([curve(job, grid) for job in runs])
            mean, low, high = mean_and_interval(curves)
            axis.plot(grid / 1000, mean, line_style, color=colour, lw=2, label=arm)
            axis.fill_between(grid / 1000, low, high, color=colour, alpha=0.15, lw=0)
            rows += [
                [env, arm, job["seed"], f"{step:.0f}", f"{value:.5g}"]
                for job, line in zip(runs, curves, strict=True)
                for step, value in zip(grid, line, strict=True)
            ]
            first = [next((step for step, value in job["episodes"] if value > GOALS[env]), None) for job in runs]
            reached = [step for step in first if step is not None]
            median = f"{np.median(reached):,.0f}" if reached else ""
            final = f"{mean[-1]:.1f} ({low[-1]:.1f} to {high[-1]:.1f})"
            lines.append([env, arm, len(runs), final, len(reached), median, sum(curves[:, -1] > GOALS[env])])
        axis.set(title=env, xlabel="agent steps (thousands)", ylabel="mean return of 20 episodes")
    handles = {
        label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(ARMS))
    figure.savefig(args.output / "curiosity.png", dpi=200)
    plt.close(figure)
    with open(args.output / "curiosity.csv", "w", newline="") as file:
        csv.writer(file).writerows([["env", "arm", "seed", "step", "return"], *rows])
    made_with = [f"commit `{git and git[:7]}`" for git in dict.fromkeys(job["git"] for job in jobs)]
    made_with += dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in job["versions"].items()) for job in jobs
    )
    made_with.append(f"{sum(job['hours'] for job in jobs):.1f} hours of one core")
    text = table(header, lines) + f"\nη = {args.eta:g}, {args.total_timesteps:,} steps; {'; '.join(made_with)}.\n"
    (args.output / "curiosity.md").write_text(text)
    print(f"{text}\nwrote {args.output / 'curiosity.md'}, .png and .csv")


def main(args):
    if args.workers < 1 or args.eta <= 0 or not args.seeds or not args.envs:
        fail("--workers must be at least 1, --eta above 0, and --seeds and --envs one or more.")
    if args.write and args.output is not None:
        fail("--write has its own folder: leave --output out, or --write.")
    unknown = [env for env in args.envs if env not in GOALS]
    if unknown:
        fail(f"{unknown[0]} is none of this study's tasks, which are {' and '.join(GOALS)}.")
    seeds, envs = dict.fromkeys(args.seeds), dict.fromkeys(args.envs)  # each once
    settings = dict(eta=args.eta, total_timesteps=args.total_timesteps)
    jobs = [dict(env=env, arm=arm, seed=seed, **settings) for seed in seeds for env in envs for arm in ARMS]
    for job in jobs:
        bdpg.check_args(script_args(job))
    for env in envs:
        least = -(-gym.spec(env).max_episode_steps // bdpg.Args.num_steps) * bdpg.Args.num_steps * bdpg.Args.num_envs
        if args.total_timesteps < least:  # whole batches are run
            fail(f"--total-timesteps must be at least {least}, or no episode of {env} would end.")
    if args.output is None:
        args = replace(args, output=ROOT / "results/curiosity" if args.write else Path("runs/curiosity-study"))
    make_folder(args.output)
    path = args.output / "finished.jsonl"
    # Also tasks and seeds that are not asked for now: the report is of all that is there.
    keys = ("env", "arm", "seed", "eta", "total_timesteps", "episodes", "git", "versions", "hours")
    done = [job for job in load_jobs(path, keys) if all(job[key] == value for key, value in settings.items())]
    jobs = [job for job in jobs if job not in [{key: other[key] for key in job} for other in done]]
    print(f"{len(jobs)} runs to do, {len(done)} done before", flush=True)
    number = 0
    for number, job in enumerate(
        run_jobs(functools.partial(run_job, folder=args.output), jobs, args.workers, path), start=1
    ):
        done.append(job)
        print(
            f"{number}/{len(jobs)}  {job['env']}, {job['arm']}, seed {job['seed']}: {job['episodes'][-1][1]:.1f}",
            flush=True,
        )
    if done:
        report(done, args)
    return int(number < len(jobs))


if __name__ == "__main__":
    start(main, Args, __doc__)
