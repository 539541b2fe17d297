"""Kills a run that saves after every batch at random moments (kill -9), and checks that its newest checkpoint always loads.

python benchmark/kill_test.py
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

SCRIPT = Path(__file__).resolve().parent.parent / "bdpg_mujoco.py"
# Batches so small that a good part of the time goes into saving.
RUN = "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --minibatch-size 16 --update-epochs 1 --total-timesteps 10000000"


@dataclass
class Args:
    kills: int = 20
    """how many times to kill"""
    longest: float = 1.0
    """the moment is drawn from 0 to this many seconds after the first new checkpoint"""
    seed: int = 0
    """seed of the moments"""


def newest(folder):
    return max(folder.rglob("checkpoint-*.pt"), default=None)


def main(args):
    random.seed(args.seed)
    failures = in_save = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for number in range(1, args.kills + 1):
            before = newest(folder)  # the first run starts afresh, every other one goes on where the last was killed
            options = [*RUN.split(), "--run-dir", folder] if before is None else ["--resume", before.parent]
            process = subprocess.Popen(
                [sys.executable, SCRIPT, "--no-cuda", "--save-every", "1", *map(str, options)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            while newest(folder) == before:
                if process.poll() is not None:
                    sys.exit(f"the run ended by itself with exit code {process.returncode}, after {number - 1} kills")
                time.sleep(0.005)
            moment = random.uniform(0, args.longest)
            time.sleep(moment)
            process.kill()
            process.wait()
            unfinished = list(folder.rglob("*.tmp"))
            in_save += bool(unfinished)
            path = newest(folder)
            try:
                checkpoint = torch.load(path, weights_only=True)
                state = f"loads, {checkpoint['global_step']:,} steps"
            except Exception as error:
                failures += 1
                state = f"DOES NOT LOAD ({type(error).__name__}: {error})"
            print(
                f"kill {number:2d}, {moment:.3f} s: {path.name} {state}{', killed while saving' if unfinished else ''}", flush=True
            )
            for leftover in unfinished:
                leftover.unlink()
    print(f"{args.kills} kills, {in_save} of them while saving: the newest checkpoint loaded {args.kills - failures} times")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main(tyro.cli(Args))
