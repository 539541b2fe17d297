"""How fast the scripts are, where the time goes and how it grows, beside a scalar critic in the same loop and SB3's PPO.

All take turns, several times, each run in a process of its own; the first iteration of a run does not count. On an idle machine:

    pip install stable-baselines3==2.9.2 opencv-python-headless    # for the comparison alone; without it SB3 is left out
    python benchmark/speed.py --task mujoco --write
    python benchmark/speed.py --task atari --write
"""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from gymnasium.vector.utils import batch_space
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import fail, fill, table

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "mujoco": {"BDPG": "bdpg_mujoco", "PPO+WGAN": "ppo_wgan_mujoco", "scalar critic": "benchmark/ppo_scalar_mujoco"},
    "atari": {
        "BDPG": "bdpg_atari",
        "PPO+WGAN": "ppo_wgan_atari",
        "PPO+QR": "ppo_qr_atari",
        "scalar critic": "benchmark/ppo_scalar_atari",
    },
}
ENV_IDS = {"mujoco": "Hopper-v5", "atari": "BreakoutNoFrameskip-v4"}
SWEEPS = {"num_envs": (4, 8, 16, 32, 64), "minibatch_size": (64, 128, 256, 512, 1024), "latent_dim": (1, 2, 8, 32)}
PHASES = {"environments": "#0072B2", "rest of the rollout": "#56B4E9", "returns and targets": "#E69F00", "update": "#D55E00"}
SB3_ROLLOUT = "#999999"  # with its environments: SB3 does not tell them apart


@dataclass
class Args:
    task: Literal[tuple(SCRIPTS)] = "mujoco"
    """which scripts: Hopper-v5 or BreakoutNoFrameskip-v4"""
    repeats: int = 5
    """runs of each"""
    iterations: int = 3
    """training batches of a run that count"""
    only: tuple[str, ...] = ()
    """measure these rows of the table alone, e.g. --only BDPG "scalar critic" (default: all)"""
    sweeps: bool = True
    """also measure how BDPG's cost grows with environments, minibatch and latent dimension"""
    write: bool = False
    """write the data to benchmark/results/ and tables and picture into docs/speed.md; without it they are only printed"""


# --- one run, in a process of its own ---


def load(name):
    return importlib.import_module(name.replace("/", "."))


class CountOperations(TorchDispatchMode):
    """Floating-point operations of matrix products and convolutions, forwards and backwards, while it is entered."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=result) if count else 0
        return result


def run_script(name, task, iterations, overrides):
    """Seconds of each phase of an iteration, from the times at which the script steps its environments and has its targets."""
    script = load(name)
    steps, targets, counter = [], [], CountOperations()
    step_envs, distribution_metrics = script.step_envs, script.distribution_metrics

    def timed_step(*given):
        if len(targets) == 1 and len(steps) == args.num_steps:
            counter.__exit__(None, None, None)
        start = time.perf_counter()
        result = step_envs(*given)
        steps.append((start, time.perf_counter()))
        return result

    def timed_metrics(*given):
        result = distribution_metrics(*given)
        targets.append(time.perf_counter())
        if len(targets) == 1:  # counts the operations of the first update, which is not timed
            counter.__enter__()
        return result

    clocks = mock.patch.multiple(script, step_envs=timed_step, distribution_metrics=timed_metrics)
    with clocks, tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = script.Args(env_id=ENV_IDS[task], cuda=False, run_dir=Path(folder), save_every=10**9, **overrides)
        args.total_timesteps = (iterations + 2) * args.num_envs * args.num_steps
        script.train(args)
    phases = {phase: [] for phase in PHASES}
    for i in range(1, iterations + 1):
        rollout = steps[i * args.num_steps : (i + 1) * args.num_steps]
        in_envs = sum(end - start for start, end in rollout)
        phases["environments"].append(in_envs)
        phases["rest of the rollout"].append(rollout[-1][1] - rollout[0][0] - in_envs)
        phases["returns and targets"].append(targets[i] - rollout[-1][1])
        phases["update"].append(steps[(i + 1) * args.num_steps][0] - targets[i])
    seconds = {phase: statistics.mean(values) for phase, values in phases.items()}
    return finish(sum(seconds.values()), args.num_envs * args.num_steps, seconds, counter.total)


def run_sb3(name, task, iterations, overrides):
    """Stable-Baselines3 with the same environments, batch, epochs and minibatch, and what its users wrap around them."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    script_args = load(SCRIPTS[task]["scalar critic"]).Args()
    starts, ends = [], []

    class Clock(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            starts.append(time.perf_counter())

        def _on_rollout_end(self):
            ends.append(time.perf_counter())

    if task == "atari":
        envs = VecFrameStack(make_atari_env(ENV_IDS[task], script_args.num_envs, seed=1), 4)
    else:
        envs = VecNormalize(make_vec_env(ENV_IDS[task], script_args.num_envs, seed=1))
    sizes = dict(n_steps=script_args.num_steps, batch_size=script_args.minibatch_size, n_epochs=script_args.update_epochs)
    agent = PPO("CnnPolicy" if task == "atari" else "MlpPolicy", envs, device="cpu", seed=1, **sizes)
    batch = script_args.num_envs * script_args.num_steps
    agent.learn((iterations + 2) * batch, callback=Clock())
    seconds = {
        "rollout": statistics.mean(ends[i] - starts[i] for i in range(1, iterations + 1)),
        "update": statistics.mean(starts[i + 1] - ends[i] for i in range(1, iterations + 1)),
    }
    return finish(sum(seconds.values()), batch, seconds, None)


def run_environment(name, task, iterations, overrides):
    """The environments alone, with random actions."""
    script = load(name)
    args = script.Args(env_id=ENV_IDS[task])
    envs = script.make_envs(args, None)
    script.reset_envs(envs, 1)
    action_space = batch_space(envs.single_action_space, args.num_envs)
    actions = [action_space.sample() for _ in range(64)]
    for _ in range(2):  # the first round warms up
        start = time.perf_counter()
        for t in range(iterations * args.num_steps):
            script.step_envs(envs, actions[t % 64])
    return finish(time.perf_counter() - start, iterations * args.num_steps * args.num_envs, {}, None)


def run_matmul(name, task, iterations, overrides):
    """The machine's rate of matrix multiplication in GFLOP/s: the best of many."""
    a, b = torch.randn(2, 1024, 1024)
    best = float("inf")
    for _ in range(40 * iterations):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best / 1e9


def finish(seconds, steps, phases, flops):
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"steps_per_second": steps / seconds, "phases": phases, "flops_of_update": flops, "megabytes": megabytes}


# --- taking turns ---


def in_own_process(function, *given):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def compare(args, contenders):
    """All runs of all contenders: {label: [result, ...]}; and the rates of matrix multiplication before each round."""
    results, rates = {label: [] for label in contenders}, []
    for repeat in range(args.repeats):
        rates.append(in_own_process(run_matmul, None, args.task, args.iterations, {}))
        for label, (function, name) in contenders.items():
            results[label].append(in_own_process(function, name, args.task, args.iterations, {}))
            print(f"{repeat + 1}/{args.repeats}  {label:18s}{results[label][-1]['steps_per_second']:8,.0f} steps/s", flush=True)
    return results, rates


def sweep(args):
    """BDPG's steps per second as one of its sizes grows: {argument: {value: steps per second}}."""
    speeds = {}
    for argument, values in SWEEPS.items():
        speeds[argument] = {}
        for value in values:
            result = in_own_process(run_script, SCRIPTS[args.task]["BDPG"], args.task, args.iterations, {argument: value})
            speeds[argument][value] = result["steps_per_second"]
            print(f"BDPG, {argument} {value}: {speeds[argument][value]:,.0f} steps/s", flush=True)
    return speeds


# --- report ---


def median(results, *keys):
    values = []
    for value in results:
        for key in keys:
            value = value[key]
        values.append(value)
    return statistics.median(values)


def ratio(results, of, to):
    """Median over rounds of the speed of one in units of the other's in the same round, and its range."""
    ratios = sorted(a["steps_per_second"] / b["steps_per_second"] for a, b in zip(results[of], results[to], strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def make_report(args, record):
    results, rate = record["results"], statistics.median(record["gflops_of_matmul"])
    rows = []
    for label, runs in results.items():
        phases = runs[0]["phases"]
        update = f"{1e3 * median(runs, 'phases', 'update'):.0f}" if phases else ""
        rollout = f"{1e3 * sum(median(runs, 'phases', phase) for phase in phases if phase != 'update'):.0f}" if phases else ""
        against = [
            "" if not phases or to not in results or to == label else ratio(results, label, to) for to in ("SB3", "scalar critic")
        ]
        flops = runs[0]["flops_of_update"]
        gflops = flops / median(runs, "phases", "update") / 1e9 if flops else 0
        efficiency = f"{gflops:.0f} ({100 * gflops / rate:.0f} %)" if flops else ""
        speed = f"{median(runs, 'steps_per_second'):,.0f}"
        rows.append([label, speed, rollout, update, *against, efficiency, f"{median(runs, 'megabytes'):.0f}"])
    header = ["", "steps/s", "rollout, ms", "update, ms", "speed / SB3", "speed / scalar critic"]
    header += ["GFLOP/s of the update", "peak memory of the main process, MB"]
    columns = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]  # without empty ones
    header, *rows = ([row[i] for i in columns] for row in [header, *rows])
    text = f"{ENV_IDS[args.task]}, {args.repeats} rounds; medians, and the range of ratios within a round. "
    text += f"Matrix multiplication: {rate:.0f} GFLOP/s.\n\n" + table(header, rows)
    for argument, speeds in record["sweeps"].items():
        text += f"\nBDPG against `--{argument.replace('_', '-')}`, steps/s:\n\n"
        text += table(speeds, [[f"{speed:,.0f}" for speed in speeds.values()]])
    return text


def plot_phases(task, results, path):
    """Where the time of a step goes, per script."""
    labels = [label for label, runs in results.items() if runs[0]["phases"]][::-1]
    figure, axis = plt.subplots(figsize=(8, 1.6 + 0.45 * len(labels)), layout="constrained")
    left = [0.0] * len(labels)
    for phase, colour in {"rollout": SB3_ROLLOUT, **PHASES}.items():
        widths = []
        for label in labels:
            seconds = {name: median(results[label], "phases", name) for name in results[label][0]["phases"]}
            share = seconds.get(phase, 0) / sum(seconds.values())
            widths.append(1e3 * share / median(results[label], "steps_per_second"))
        if any(widths):
            axis.barh(labels, widths, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set(xlabel=f"milliseconds per step, {ENV_IDS[task]}")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(args):
    if args.repeats < 1 or args.iterations < 1:
        fail("--repeats and --iterations must be at least 1.")
    contenders = {label: (run_script, name) for label, name in SCRIPTS[args.task].items()}
    contenders["environments alone"] = (run_environment, SCRIPTS[args.task]["BDPG"])
    if importlib.util.find_spec("stable_baselines3") and (args.task == "mujoco" or importlib.util.find_spec("cv2")):
        contenders["SB3"] = (run_sb3, None)
    else:
        print("Stable-Baselines3 is left out; install it with: pip install stable-baselines3==2.9.2 opencv-python-headless")
    unknown = [label for label in args.only if label not in contenders]
    if unknown:
        fail(f"there is no {unknown[0]!r} to measure; there are: {', '.join(contenders)}.")
    contenders = {label: contenders[label] for label in args.only or contenders}
    results, rates = compare(args, contenders)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "git": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or None,
        "task": args.task,
        "env_id": ENV_IDS[args.task],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
        "gflops_of_matmul": rates,
        "results": results,
        "sweeps": sweep(args) if args.sweeps else {},
    }
    text = make_report(args, record)
    print(f"\n{text}")
    if args.write:
        text = f"`{record['command']}`, commit `{(record['git'] or 'unknown')[:7]}`.\n\n{text}"
        folder = ROOT / "benchmark" / "results"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"speed_{args.task}.json").write_text(json.dumps(record, indent=1) + "\n")
        plot_phases(args.task, results, ROOT / "docs" / "figures" / f"speed_{args.task}.png")
        text += f"\n![Where the time goes, {args.task}](figures/speed_{args.task}.png)\n"
        fill(ROOT / "docs" / "speed.md", args.task, text)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
