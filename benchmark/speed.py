"""How fast the scripts are beside each other, beside Stable-Baselines3's PPO, or beside another version of themselves.

All take turns for several rounds, each run in a process of its own. The first iteration of a run does not count. Ratios
are those within a round, since a machine's speed wanders. On an idle machine:

    pip install stable-baselines3==2.9.2 opencv-python-headless    # for SB3, which is left out without it
    python benchmark/speed.py --env-id Hopper-v5
    python benchmark/speed.py --env-id BreakoutNoFrameskip-v4 --output results/speed_atari
    git worktree add /tmp/old COMMIT && python benchmark/speed.py --only BDPG "BDPG, old" --against /tmp/old
"""

import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
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
from typing import Optional
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind the folder of another version, see load()
from benchmark.common import fail, make_folder, start, table

ROOT = Path(__file__).resolve().parent.parent
METHODS = {"BDPG": "bdpg", "PPO+WGAN": "ppo_wgan", "PPO+QR": "ppo_qr", "PPO": "ppo"}
ROLLOUT = ("environments", "rest of the rollout")


@dataclass
class Args:
    env_id: str = "Hopper-v5"
    """the task, which decides between the Atari and the MuJoCo scripts"""
    rounds: int = 5
    """runs of each"""
    iterations: int = 3
    """iterations of a run that count"""
    only: tuple[str, ...] = ()
    """measure these rows of the table alone, e.g. --only BDPG PPO SB3 (default: all)"""
    set: tuple[str, ...] = ()
    """arguments for all scripts that have them: minibatch-size=64 update-epochs=4 (SB3 follows)"""
    against: Optional[Path] = None
    """also measure the scripts of this checkout"""
    output: Optional[Path] = None
    """also write the measurements to OUTPUT.json and the table to OUTPUT.md"""


# --- one run, in a process of its own ---


def find_script(folder, method, env_id):
    """The script's name in a checkout, as a module, or None. In older ones plain PPO is the benchmark's."""
    kind = "atari" if "NoFrameskip" in env_id or env_id.startswith("ALE/") else "mujoco"
    names = [f"{method}_{kind}", f"benchmark.{method}_scalar_{kind}"]
    return next((name for name in names if (folder / f"{name.replace('.', '/')}.py").is_file()), None)


def load(folder, method, env_id):
    sys.path.insert(0, str(folder))
    return importlib.import_module(find_script(folder, method, env_id))


def make_args(script, env_id, settings, **rest):
    """The script's defaults, but for the settings that it knows."""
    args = script.Args(env_id=env_id, cuda=False, save_every=10**9, **rest)
    for name, text in settings.items():
        if hasattr(args, name):
            setattr(args, name, type(getattr(args, name))(json.loads(text.lower())))
    return args


def run_script(folder, method, env_id, iterations, settings):
    """Seconds of each phase of an iteration, from the times at which the script steps its environments and shuffles its
    samples, with which an update begins."""
    script = load(Path(folder), method, env_id)
    steps, updates = [], []

    def clocked(step):
        def clocked_step(*given):
            start = time.perf_counter()
            result = step(*given)
            steps.append((start, time.perf_counter()))
            return result

        return clocked_step

    def shuffle(*given, shuffle=torch.randperm, **options):
        updates.append((len(steps), time.perf_counter()))
        return shuffle(*given, **options)

    owner, name = (script.Environments, "step") if hasattr(script, "Environments") else (script, "step_envs")
    clocks = [
        mock.patch.object(owner, name, clocked(getattr(owner, name))),
        mock.patch.object(torch, "randperm", shuffle),
    ]
    with contextlib.ExitStack() as stack:
        for context in (*clocks, contextlib.redirect_stdout(io.StringIO())):
            stack.enter_context(context)
        runs = stack.enter_context(tempfile.TemporaryDirectory())
        args = make_args(script, env_id, settings, run_dir=type(script.Args.run_dir)(runs))
        args.total_timesteps = (iterations + 2) * args.num_envs * args.num_steps
        script.train(args)
    begins = {len_steps: at for len_steps, at in reversed(updates)}  # the first shuffle after each rollout
    phases = {phase: [] for phase in (*ROLLOUT, "returns and targets", "update")}
    for first in range(args.num_steps, (iterations + 1) * args.num_steps, args.num_steps):
        rollout, begin = steps[first : first + args.num_steps], begins[first + args.num_steps]
        in_envs = sum(end - start for start, end in rollout)
        phases["environments"].append(in_envs)
        phases["rest of the rollout"].append(rollout[-1][1] - rollout[0][0] - in_envs)
        phases["returns and targets"].append(begin - rollout[-1][1])
        phases["update"].append(steps[first + args.num_steps][0] - begin)
    return finish({phase: statistics.mean(values) for phase, values in phases.items()}, args)


def run_sb3(folder, method, env_id, iterations, settings):
    """Stable-Baselines3 with the same environments, batch, epochs and minibatch, in the wrappers its users take."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    script = load(Path(folder), method, env_id)
    args, starts, ends = make_args(script, env_id, settings), [], []

    class Clock(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            starts.append(time.perf_counter())

        def _on_rollout_end(self):
            ends.append(time.perf_counter())

    if script.__name__.endswith("atari"):
        policy, envs = "CnnPolicy", VecFrameStack(make_atari_env(env_id, args.num_envs, seed=1), 4)
    else:
        policy, envs = "MlpPolicy", VecNormalize(make_vec_env(env_id, args.num_envs, seed=1))
    sizes = dict(n_steps=args.num_steps, batch_size=args.minibatch_size, n_epochs=args.update_epochs)
    agent = PPO(policy, envs, device="cpu", seed=1, **sizes)
    agent.learn((iterations + 2) * args.num_envs * args.num_steps, callback=Clock())
    rollout = statistics.mean(ends[i] - starts[i] for i in range(1, iterations + 1))
    update = statistics.mean(starts[i + 1] - ends[i] for i in range(1, iterations + 1))
    return finish({"rollout": rollout, "update": update}, args)


def finish(phases, args):
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps_per_second = args.num_envs * args.num_steps / sum(phases.values())
    return {"steps_per_second": steps_per_second, "phases": phases, "megabytes": megabytes}


# --- taking turns ---


def in_own_process(function, *given):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def compare(args, contenders, settings):
    """All runs of all contenders: {label: [result, ...]}."""
    results = {label: [] for label in contenders}
    for number in range(args.rounds):
        for label, (function, folder, method) in contenders.items():
            result = in_own_process(function, str(folder), method, args.env_id, args.iterations, settings)
            results[label].append(result)
            print(f"{number + 1}/{args.rounds}  {label:18s}{result['steps_per_second']:8,.0f} steps/s", flush=True)
    return results


def ratio(results, of, to):
    """Median over rounds of the speed of one in units of the other's in the same round, and its range."""
    ratios = sorted(
        a["steps_per_second"] / b["steps_per_second"] for a, b in zip(results[of], results[to], strict=True)
    )
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def make_table(results):
    """Medians of each contender, and its speed in units of SB3's, plain PPO's and that of its own older version."""
    rows = []
    for label, runs in results.items():
        medians = {name: statistics.median(run["phases"][name] for run in runs) for name in runs[0]["phases"]}
        times = [1e3 * medians.get(name, 0) for name in ("environments", "update")]
        times.insert(1, 1e3 * sum(medians.values()) - sum(times))
        cells = [f"{statistics.median(run['steps_per_second'] for run in runs):,.0f}"]
        cells += [f"{milliseconds:.0f}" if milliseconds else "" for milliseconds in times]
        cells += [ratio(results, label, to) if to in results and to != label else "" for to in ("SB3", "PPO")]
        cells += [ratio(results, label, f"{label}, old") if f"{label}, old" in results else ""]
        rows.append([label, *cells, f"{statistics.median(run['megabytes'] for run in runs):.0f}"])
    header = ["", "steps/s", "environments, ms", "rest of rollout and targets, ms", "update, ms"]
    header += ["speed / SB3", "speed / PPO", "speed / old", "peak memory, MB"]
    columns = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]  # without empty ones
    header, *rows = ([row[i] for i in columns] for row in [header, *rows])
    return table(header, rows)


def main(args):
    if args.rounds < 1 or args.iterations < 1:
        fail("--rounds and --iterations must be at least 1.")
    if args.against is not None and not find_script(args.against, "bdpg", args.env_id):
        fail(f"there are no scripts in {args.against}.")
    try:
        settings = {name.replace("-", "_"): value for name, value in (item.split("=") for item in args.set)}
        [json.loads(value.lower()) for value in settings.values()]
    except ValueError:
        fail("--set takes NAME=VALUE with a number, true or false.")
    contenders = {}
    for label, method in METHODS.items():
        contenders[label] = (run_script, ROOT, method)
        if args.against is not None and find_script(args.against, method, args.env_id):
            contenders[f"{label}, old"] = (run_script, args.against.resolve(), method)
    if importlib.util.find_spec("stable_baselines3") and importlib.util.find_spec("cv2"):
        contenders["SB3"] = (run_sb3, ROOT, "ppo")
    elif not args.only or "SB3" in args.only:
        print(
            "Stable-Baselines3 is left out; to install it: pip install stable-baselines3==2.9.2 opencv-python-headless"
        )
    unknown = [label for label in args.only if label not in contenders]
    if unknown:
        fail(f"there is no {unknown[0]!r} to measure; there are: {', '.join(contenders)}.")
    results = compare(args, {label: contenders[label] for label in args.only or contenders}, settings)
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {"command": shlex.join(["python", *sys.argv]), "git": git, "torch": torch.__version__}
    record |= {"env_id": args.env_id, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "results": results}
    text = f"`{record['command']}`, commit `{git[:7]}`, {record['threads']} threads on {record['cores']} cores; "
    text += f"medians of {args.rounds} rounds, and the range of ratios within a round.\n\n{make_table(results)}"
    print(f"\n{text}")
    if args.output is not None:
        make_folder(args.output.parent)
        args.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        args.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    start(main, Args, __doc__)
