"""Runs an experiment: methods, tasks, seeds and arguments. Skips what is finished, resumes what was interrupted.

    python benchmark/run.py --preset mujoco-figure --dry-run
    python benchmark/run.py --preset mujoco-figure --workers 2
    python benchmark/run.py --scripts bdpg_mujoco.py --envs Hopper-v5 --seeds 1 2 3 --set eta=0,0.1 u-bar=10,inf
    python benchmark/run.py --preset atari-figure --executor slurm --partition gpu --gpus 1 --workers 40

Each run has a folder in runs/NAME with its log; NAME is the preset, or "grid". What is finished is added to
results/NAME: a CSV file per run, small enough for a repository, and runs.json with arguments, commit, versions, time
and score. A folder is for one experiment: with other arguments it needs another --run-dir.
Ctrl-C, SIGTERM and SIGHUP stop all runs, which save; the same command goes on. benchmark/plot.py draws the results.
"""

import contextlib
import dataclasses
import difflib
import fcntl
import functools
import importlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are imported to check their arguments
from benchmark.common import FREE, fail, keep_result, make_folder, read_records, read_run, start

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("*_*.py") if path.stem.endswith(("_atari", "_mujoco")))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

# Agent steps per second on one core of a two-core CPU, and the most threads that a script makes use of: a first guess.
SPEED = {"atari": (130, 4), "mujoco": (1800, 1)}


class Experiment(NamedTuple):
    methods: dict  # name of a method: its script and the arguments that make it this method
    envs: tuple
    total_timesteps: Optional[int] = None  # None: the script's default
    seeds: tuple = (1, 2, 3, 4, 5)
    settings: dict = {}  # further arguments, {name: values}, of which all combinations are run


GAMES = ("Freeway", "Hero", "Seaquest", "Venture", "Breakout", "Qbert", "Asterix", "BeamRider")
TASKS = ("Hopper", "HalfCheetah", "Walker2d", "InvertedDoublePendulum", "Swimmer", "Ant")
PRESETS = {
    "atari-figure": Experiment(
        {
            "bdpg": ("bdpg_atari.py", {"eta": "0.1"}),
            "bdpg-naive": ("bdpg_atari.py", {"eta": "0"}),
            "ppo-wgan": ("ppo_wgan_atari.py", {}),
            "ppo-qr": ("ppo_qr_atari.py", {}),
            "ppo": ("ppo_atari.py", {}),
        },
        envs=tuple(f"{game}NoFrameskip-v4" for game in GAMES),  # the first four are hard to explore
        total_timesteps=10_000_000,
    ),
    "mujoco-figure": Experiment(
        {
            "bdpg-naive": ("bdpg_mujoco.py", {"eta": "0"}),
            "ppo-wgan": ("ppo_wgan_mujoco.py", {}),
            "ppo-qr": ("ppo_qr_mujoco.py", {}),
            "ppo": ("ppo_mujoco.py", {}),
        },
        envs=tuple(f"{task}-v5" for task in TASKS),
        total_timesteps=1_000_000,
    ),
    # The paper reports scores at 10M and at 150M steps. Of the values on its axes its text names k = 1 and ū = inf.
    "ablation": Experiment(
        {"bdpg": ("bdpg_atari.py", {})},
        envs=("BreakoutNoFrameskip-v4", "QbertNoFrameskip-v4"),
        total_timesteps=151_000_000,
        seeds=(1,),
        settings={
            "bootstrap-length": ["1", "8", "32", "128", "256"],
            "u-bar": ["1", "10", "100", "inf"],
            "eta": ["0.01", "0.1", "1"],
        },
    ),
}


@dataclass
class Args:
    preset: Optional[str] = None
    """a named experiment: atari-figure, mujoco-figure or ablation; what follows changes it"""
    scripts: tuple[str, ...] = ()
    """without a preset: the scripts to run"""
    envs: tuple[str, ...] = ()
    """the tasks"""
    seeds: tuple[int, ...] = ()
    """the seeds (without a preset: 1 to 5)"""
    total_timesteps: Optional[int] = None
    """agent steps of each run"""
    set: tuple[str, ...] = ()
    """further arguments of the scripts; of several values all combinations are run: num-envs=8 eta=0,0.1 cuda=False"""
    run_dir: Optional[Path] = None
    """where the runs' folders are made (default: runs/PRESET, or runs/grid); results/ has one of the same name"""
    dry_run: bool = False
    """only show what would be run, with commands, and about how long it would take"""
    executor: Literal["local", "slurm"] = "local"
    """processes on this machine, or a job array of a Slurm cluster (needs `pip install submitit`)"""
    workers: Optional[int] = None
    """runs at once (default: one per core; on Slurm as many as the cluster lets)"""
    partition: Optional[str] = None
    """Slurm: the partition"""
    hours: int = 24
    """Slurm: time limit of a job; a run that reaches it saves, and is queued again to go on"""
    cpus: int = 4
    """Slurm: cores per job"""
    gpus: int = 0
    """Slurm: GPUs per job"""


def say(text, end="\n"):
    """Prints, and goes on if nobody listens any more: runs are stopped in order after a terminal was closed, too."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


def check_name(name, known, kind):
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are: {', '.join(known)}."
        fail(f"there is no {kind} {name!r}; {hint}")


# --- what to run ---


@dataclass(frozen=True)
class Run:
    method: str
    script: str
    env_id: str
    seed: int
    folder: Path  # holds log.txt, and the folder that the script makes
    arguments: tuple
    steps: int  # when it is finished
    results: Path = Path("results")

    def __str__(self):
        return f"{self.method} {self.env_id} seed {self.seed}"

    def name(self):
        """Of its results."""
        return f"{self.folder.parent.name}/{self.method}_seed{self.seed}"

    def checkpoint(self):
        return max(self.folder.glob("*/checkpoint-[0-9]*.pt"), key=lambda path: path.name, default=None)

    def steps_saved(self):
        checkpoint = self.checkpoint()
        return int(checkpoint.stem.removeprefix("checkpoint-")) if checkpoint else 0

    def state(self):
        saved = self.steps_saved()
        return "finished" if saved >= self.steps else "to resume" if saved else "new"

    def command(self):
        checkpoint, arguments = self.checkpoint(), list(self.arguments)
        if checkpoint:  # which holds all arguments but these
            at = arguments.index("--total-timesteps")
            device = [argument for argument in arguments if argument in ("--cuda", "--no-cuda")]
            arguments = ["--resume", str(checkpoint.parent), *arguments[at : at + 2], *device]
        return [sys.executable, str(ROOT / self.script), *arguments]

    def log_tail(self):
        with open(self.folder / "log.txt", "rb") as log:
            log.seek(-min(2000, log.seek(0, os.SEEK_END)), os.SEEK_END)
            return log.read().decode(errors="replace").strip()

    def keep(self):
        """Adds what has come of it to the results."""
        keep_result(read_run(self.checkpoint().parent), self.results, self.name())


def choose_experiment(args):
    """The preset, or an experiment of the given scripts, with what the command line changes."""
    if args.preset is not None:
        check_name(args.preset, PRESETS, "preset")
        experiment = PRESETS[args.preset]
    for script in args.scripts:
        check_name(script, SCRIPTS, "script")
    if (args.preset is None) == (not args.scripts) or not (args.preset or args.envs):
        fail(f"give either --preset ({', '.join(PRESETS)}), or --scripts and --envs.")
    if args.scripts:
        experiment = Experiment({Path(script).stem: (script, {}) for script in args.scripts}, args.envs)
    settings = {}
    for setting in args.set:
        name, _, values = setting.partition("=")
        if not all(values.split(",")):
            fail(f"--set takes NAME=VALUE or NAME=VALUE,VALUE, not {setting!r}.")
        name = name.replace("_", "-")
        if name in settings:
            fail(f"--set {name} is there twice; give all its values at once: {name}=VALUE,VALUE.")
        settings[name] = values.split(",")
    for name in {"env-id", "seed", "total-timesteps", "run-dir", "resume"} & {*settings}:
        fail(f"--set {name} is not possible: --envs, --seeds, --total-timesteps and --run-dir do it for all runs.")
    for name in {name for _, own in experiment.methods.values() for name in own} & {*settings}:
        fail(f"--set {name} is not possible: it is what tells the methods of {args.preset} apart.")
    return experiment._replace(
        envs=tuple(dict.fromkeys(args.envs or experiment.envs)),
        seeds=tuple(dict.fromkeys(args.seeds or experiment.seeds)),
        total_timesteps=experiment.total_timesteps if args.total_timesteps is None else args.total_timesteps,
        settings=experiment.settings | settings,
    )


@functools.cache
def parse_setting(script, name, value):
    """An argument as the script's command line takes it, and its value; refuses what the script would not take."""
    module = importlib.import_module(Path(script).stem)
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(module.Args)}
    check_name(name, list(fields), f"argument of {script}")
    is_flag = fields[name].type is bool and value.lower() in ("true", "false")
    option = [f"--{name}" if value.lower() == "true" else f"--no-{name}"] if is_flag else [f"--{name}", value]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return option, getattr(tyro.cli(module.Args, args=option), fields[name].name)
    except SystemExit:
        fail(f"{script} does not take {name}={value}.")


def check_unmixed(name, made, wanted):
    """A place is for one run; refuses if it holds one that was made with other arguments."""
    changed = [f"{key} was {made.get(key)}" for key in wanted if key not in FREE and made.get(key) != wanted[key]]
    if changed:
        fail(f"{name} is a run with other arguments ({', '.join(changed)}); choose another --run-dir.")


def plan(args):
    """Every run of the experiment, checked as far as it can be before it starts."""
    experiment, runs, playable = choose_experiment(args), [], set()
    # Settings of a preset are in folders' names even if there is one value for now.
    in_names = set(PRESETS[args.preset].settings) if args.preset else set()
    run_dir = (args.run_dir or Path("runs") / (args.preset or "grid")).resolve()
    results = Path("results", run_dir.name).resolve()
    records = read_records(results)
    for method, (script, own) in experiment.methods.items():
        module = importlib.import_module(Path(script).stem)
        choices = []
        for name, texts in ({name: [text] for name, text in own.items()} | experiment.settings).items():
            values = {}  # the same value can be written in several ways
            for text in texts:
                option, value = parse_setting(script, name, text)
                values.setdefault(value, (name, text, option, value))
            in_names |= {name} if len(values) > 1 else set()
            choices.append(values.values())
        for combination in itertools.product(*choices):
            variant = "_".join([method, *(f"{name}={text}" for name, text, *_ in combination if name in in_names)])
            parsed = module.Args(**{name.replace("-", "_"): value for name, _, _, value in combination})
            if experiment.total_timesteps is not None:
                parsed.total_timesteps = experiment.total_timesteps
            parsed.num_steps = max(parsed.num_steps, parsed.bootstrap_length or 0)  # as the script does
            batch = parsed.num_envs * parsed.num_steps
            for env_id, seed in itertools.product(experiment.envs, experiment.seeds):
                wanted = dataclasses.replace(parsed, env_id=env_id, seed=seed)
                module.check_args(wanted)
                folder = run_dir / variant / re.sub("[/:]", "-", env_id) / f"seed-{seed}"
                arguments = ["--env-id", env_id, "--seed", str(seed), "--run-dir", str(folder)]
                arguments += ["--total-timesteps", str(parsed.total_timesteps)]
                arguments += [text for _, _, option, _ in combination for text in option]
                steps = parsed.total_timesteps // batch * batch
                runs.append(Run(variant, script, env_id, seed, folder, tuple(arguments), steps, results))
                for path in folder.glob("*/run.json"):
                    try:
                        made = {**json.loads(path.read_text())["args"]}
                    except (OSError, ValueError, KeyError, TypeError):
                        fail(f"{path} is damaged; move its folder away or choose another --run-dir.")
                    check_unmixed(path.parent, made, vars(wanted))
                if kept := records.get(runs[-1].name()):
                    check_unmixed(results / runs[-1].name(), kept["args"], vars(wanted))
                    if kept["steps"] > steps:
                        fail(f"{results / runs[-1].name()} is a longer run; choose another --run-dir.")
                if (key := (env_id, script.rpartition("_")[2])) not in playable:  # the script itself knows best
                    module.Environments(dataclasses.replace(wanted, num_envs=1), seed).envs.close()
                    playable.add(key)
    # Seed by seed, and the methods of a task one after another: what is stopped early has something of everything.
    return sorted(runs, key=lambda run: (experiment.seeds.index(run.seed), experiment.envs.index(run.env_id)))


def show_plan(runs, workers, threads, with_commands):
    """Prints what there is to do and about how long it takes."""
    for method, env_id in dict.fromkeys((run.method, run.env_id) for run in runs):
        states = Counter(run.state() for run in runs if (run.method, run.env_id) == (method, env_id))
        print(f"{method}  {env_id}:  {', '.join(f'{number} {state}' for state, number in states.items())}")
    todo = [run for run in runs if run.state() != "finished"]
    seconds = 0
    for run in todo:
        speed, useful_threads = SPEED[Path(run.script).stem.rpartition("_")[2]]
        seconds += (run.steps - run.steps_saved()) / (speed * min(threads, useful_threads))
        if with_commands:
            print(shlex.join(run.command()))
    at_once = min(workers, len(todo))
    minutes = seconds / max(at_once, 1) / 60
    duration = f"{minutes / 60:,.1f} h" if minutes >= 60 else f"{minutes:.0f} min"
    print(f"{len(todo)} of {len(runs)} runs to do, {at_once} at once, threads for each: {threads}; ", end="")
    print(f"about {duration} on a CPU")


# --- running ---


class TrainingJob:
    """A run as a process. Local ones are started from here; on a cluster submitit calls this on the job's machine."""

    def __init__(self, run, threads):
        self.run, self.threads, self.process, self.not_started = run, threads, None, None

    def start(self):
        try:
            self.start_process()
        except BlockingIOError:
            self.not_started = "another process is at it"
        except OSError as error:  # a full disk, say, must not stop the others
            self.not_started = f"{error.strerror}: {error.filename}"
        return self

    def start_process(self):
        self.run.folder.mkdir(parents=True, exist_ok=True)
        with open(self.run.folder / "log.txt", "a") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # inherited by the script: held for as long as it lives
            if (
                self.run.state() == "finished"
            ):  # by another call meanwhile, or in the last moment of a job of the cluster
                return
            command = self.run.command()
            print("$", shlex.join(command), file=log, flush=True)
            # A session of its own: signals of the terminal then reach the script once, from `stop`. SIGUSR2, by which
            # Slurm warns all processes of a job, stays blocked in the script, which it would kill: see `checkpoint`.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

    def done(self):
        return self.process is None or self.process.poll() is not None

    def stop(self):
        if not self.done():
            self.process.send_signal(signal.SIGTERM)

    def wait(self):
        while not self.done():
            time.sleep(0.2)

    def result(self):
        """None, or why the run is not finished."""
        if self.process is None:
            return self.not_started
        if self.process.returncode:
            return f"exit code {self.process.returncode}: {self.run.log_tail().splitlines()[-1]}"

    def __call__(self):
        self.start()
        self.wait()
        return self.result()

    def checkpoint(self):
        """Called by submitit when time is up or the machine is wanted: saves, and returns the job that goes on."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        self.wait()
        return DelayedSubmission(TrainingJob(self.run, self.threads))


def submit(runs, args):
    """Hands the runs to the cluster as one job array, unless the one before it is still there."""
    try:
        import submitit
    except ImportError:
        fail("--executor slurm needs submitit; install it with: pip install submitit")
    folder = runs[0].folder.parents[2] / "submitit"
    last_array = folder / "last_array.txt"
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=1000)
        array_id = last_array.read_text().strip() if last_array.exists() else None
        squeue = ["squeue", "--noheader", "--jobs", str(array_id)]
        if array_id and subprocess.run(squeue, capture_output=True, text=True).stdout.strip():
            fail(f"jobs of this folder are in the queue; wait for them, or stop them first: scancel {array_id}")
        executor.update_parameters(
            name=args.preset or "grid",
            timeout_min=60 * args.hours,
            cpus_per_task=args.cpus,
            gpus_per_node=args.gpus,
            slurm_partition=args.partition,
            slurm_array_parallelism=args.workers,
        )
        with executor.batch():
            jobs = [executor.submit(TrainingJob(run, args.cpus)) for run in runs]
    except RuntimeError as error:
        fail(f"Slurm does not take the jobs ({str(error).strip().splitlines()[-1]}).")
    last_array.write_text(jobs[0].job_id.split("_")[0])
    return jobs


def follow(runs, waiting, active, workers, threads, stops):
    """Starts what waits, says how far everything is and keeps the results, until nothing runs any more.

    Returns the failures {run: reason}. Whatever ends it, no process that was started from here goes on without it."""
    steps = {run: min(run.steps_saved(), run.steps) for run in runs}
    total, steps_before, start_time = sum(run.steps for run in runs), sum(steps.values()), time.time()
    failures, stops_passed_on, in_terminal, last_line_time = {}, 0, sys.stdout.isatty(), time.time()
    clear = "\r\033[K" if in_terminal else ""
    try:
        while active or (waiting and not stops):
            while waiting and len(active) < workers and not stops:
                run = waiting.popleft()
                active[run] = TrainingJob(run, threads).start()
            if len(stops) > stops_passed_on:
                if any(
                    not isinstance(job, TrainingJob) for job in active.values()
                ):  # a cluster's jobs go on without us
                    break
                stops_passed_on = len(stops)
                say(f"{clear}stopping after the current iteration of each run; once more to stop at once")
                for job in active.values():
                    job.stop()
            for run, job in list(active.items()):
                with contextlib.suppress(OSError, IndexError):  # no log, or no step in it yet
                    logged = re.findall(r"^step ([\d,]+)", run.log_tail(), re.M)[-1]
                    steps[run] = max(steps[run], int(logged.replace(",", "")))
                if job.done():
                    try:
                        reason = job.result()
                        if reason is None:
                            steps[run] = run.steps
                            run.keep()
                    except (
                        Exception
                    ) as error:  # submitit raises what went wrong on the other machine; a disk can be full
                        reason = (str(error).strip() or repr(error)).splitlines()[-1]
                    del active[run]
                    if reason is not None and not stops:
                        failures[run] = reason
                    say(f"{clear}{'finished' if reason is None else 'stopped' if stops else 'FAILED'}: {run}")
            done, seconds = sum(steps.values()), time.time() - last_line_time
            if done > steps_before and (seconds > 60 or (in_terminal and seconds > 1)):
                last_line_time = time.time()
                hours = (total - done) / (done - steps_before) * (last_line_time - start_time) / 3600
                finished = sum(steps[run] == run.steps for run in runs)
                line = f"{done / total:.1%}: {finished} of {len(runs)} runs finished, {len(active)} running, "
                say(f"{clear}{line}{len(failures)} failed, {hours:.1f} h left", end="" if in_terminal else "\n")
            time.sleep(0.2 if workers <= CORES else 2)  # hundreds of jobs of a cluster have hundreds of logs to look at
    finally:
        mine = [job for job in active.values() if isinstance(job, TrainingJob)]
        for job in mine:
            job.stop()
        for job in mine:
            job.wait()
    return failures


def main(args):
    if args.workers is not None and args.workers < 1:
        fail(f"--workers must be at least 1, not {args.workers}.")
    if args.cpus < 1 or args.hours < 1 or args.gpus < 0:
        fail("--cpus and --hours must be at least 1, and --gpus at least 0.")
    runs = plan(args)
    on_cluster = args.executor == "slurm"
    workers = args.workers or (len(runs) if on_cluster else CORES)
    threads = args.cpus if on_cluster else max(1, CORES // workers)
    show_plan(runs, workers, threads, with_commands=args.dry_run)
    if args.dry_run:
        return 0
    make_folder(runs[0].folder.parents[2])
    make_folder(runs[0].results)
    kept = read_records(runs[0].results)
    for run in runs:  # jobs of a cluster may have ended while nobody looked on
        if run.state() == "finished" and kept.get(run.name(), {}).get("steps") != run.steps_saved():
            run.keep()
    waiting, active, stops = deque(run for run in runs if run.state() != "finished"), {}, []
    if not waiting:
        return 0
    if on_cluster:
        active = dict(zip(waiting, submit(waiting, args), strict=True))
        waiting.clear()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, lambda number, frame: stops.append(number)) for number in signals]
    failures = follow(runs, waiting, active, workers, threads, stops)
    for number, handler in zip(signals, handlers, strict=True):
        signal.signal(number, handler)

    for run, reason in failures.items():
        print(f"failed: {run}: {reason}; log: {run.folder / 'log.txt'}", file=sys.stderr)
    finished = sum(run.state() == "finished" for run in runs)
    folders = f"{runs[0].folder.parents[2]}, results in {runs[0].results}"
    say(f"{finished} of {len(runs)} runs are finished; they are in {folders}")
    if active:
        job_ids = {job.job_id.split("_")[0] for job in active.values()}
        say(f"the jobs go on without this program; to stop them: scancel {' '.join(job_ids)}")
    elif stops or failures:
        say(f"to go on: {shlex.join(['python', *sys.argv])}")
    return 128 + stops[0] if stops else 1 if failures else 0


if __name__ == "__main__":
    start(main, Args, __doc__)
