"""What BDPG costs: time per step against the same loop with a plain scalar critic (ppo_scalar_*.py, beside this file).

Both run in turns, several times, each on its own; the first iteration of a run (warm-up) does not count. On an idle machine:

    python benchmark/cost.py --task mujoco
    python benchmark/cost.py --task atari
"""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    task: Literal["mujoco", "atari"] = "mujoco"
    """which pair of scripts"""
    repeats: int = 5
    """runs of each script"""
    iterations: int = 5
    """training batches per run, the first of which does not count"""


def seconds_per_step(script, task, iterations):
    """Mean over the run's iterations after the first, from its own log."""
    batch = 16 * {"mujoco": 256, "atari": 128}[task]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--total-timesteps", str(batch * iterations), "--run-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        log = EventAccumulator(str(next(Path(folder).iterdir()))).Reload()
        points = [(event.step, event.step / event.value) for event in log.Scalars("charts/steps_per_second")]
    (first_step, first_seconds), (last_step, last_seconds) = points[0], points[-1]
    return (last_seconds - first_seconds) / (last_step - first_step)


def main(args):
    if args.repeats < 1 or args.iterations < 2:
        print("error: --repeats must be at least 1 and --iterations at least 2.", file=sys.stderr)
        raise SystemExit(2)
    scripts = {"scalar critic": ROOT / "benchmark" / f"ppo_scalar_{args.task}.py", "BDPG": ROOT / f"bdpg_{args.task}.py"}
    times = {name: [] for name in scripts}
    for repeat in range(args.repeats):
        for name, script in scripts.items():
            times[name].append(seconds_per_step(script, args.task, args.iterations))
            print(f"{repeat + 1}/{args.repeats}  {name:14s}{1 / times[name][-1]:8.0f} steps/s", flush=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"median  {name:14s}{1 / median:8.0f} steps/s  {1e3 * median:.3f} ms per step")
    ratios = sorted(b / s for b, s in zip(times["BDPG"], times["scalar critic"], strict=True))
    print(f"BDPG / scalar critic: {medians['BDPG'] / medians['scalar critic']:.2f} (in turns: {ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
