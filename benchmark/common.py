"""What the tools of benchmark/ and studies/ share. (The scripts share nothing: each is whole.)"""

import csv
import fcntl
import functools
import io
import json
import math
import multiprocessing
import os
import signal
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

# Arguments that may change when a run goes on: they do not make it another run.
FREE = ("total_timesteps", "run_dir", "save_every", "resume", "cuda", "track")
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "envpool")  # whose versions can matter to a score


def fail(message):
    """One sentence on stderr and exit code 2: a user who is wrong never sees a traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def start(main, args_class, description):
    """A tool as a program: whatever the disk, the terminal or the user stops it with, it ends in a sentence."""
    try:
        sys.exit(main(tyro.cli(args_class, description=description)))
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fail(f"{error.filename or 'the system'}: {error.strerror or error}.")
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is left", file=sys.stderr)
        sys.exit(130)


def table(header, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in [header, ["---"] * len(header), *rows])


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"the folder {path} cannot be made ({error.strerror}); choose another.")


def write_atomically(path, text):
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


# --- runs and their results ---


def interval_steps(record):
    """The steps over which the paper averages scores: 80 iterations on Atari, 4 on MuJoCo, which are 16 of ours."""
    iterations = 80 if record["script"].endswith("_atari.py") else 16
    return iterations * record["args"]["num_envs"] * record["args"]["num_steps"]


def read_events(folder):
    """All scalars that a run logged, {tag: [(step, value), ...]}. A log that breaks off is named."""
    points = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):  # their names begin with the time
        size_read = 0
        for record in RawEventFileLoader(str(path)).Load():
            size_read += len(record) + 16  # with its length and checksums
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:  # a resumed run: what came after its checkpoint is void
                for tag in points:
                    points[tag] = [point for point in points[tag] if point[0] < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points[value.tag].append((event.step, value.simple_value))
        if size_read < path.stat().st_size:
            print(f"skipped the end of {path}: it breaks off", file=sys.stderr)
    return points


def read_run(folder):
    """A run from its folder, in short: its record, and a table of what it logged, a row for each quarter of the paper's
    interval: the number of episodes that ended in it and their mean return, and means of what else was logged."""
    record = json.loads((folder / "run.json").read_text())
    events = read_events(folder)
    episodes = events.pop("charts/episodic_return", [])
    end = max((points[-1][0] for points in [episodes, *events.values()] if points), default=0)
    bin_steps = interval_steps(record) // 4
    table = defaultdict(lambda: np.full(math.ceil(end / bin_steps), np.nan))
    table["step"] = np.minimum(bin_steps * np.arange(1, 1 + math.ceil(end / bin_steps)), end)
    kept = [
        tag for tag in events if tag.startswith(("return_model/", "curiosity/")) or tag == "charts/steps_per_second"
    ]
    columns = {tag.split("/")[1]: events[tag] for tag in sorted(kept)}
    for name, points in {"return": episodes, **columns}.items():
        if points:
            steps, values = np.array(points).T
            bins = np.ceil(steps / bin_steps).astype(int) - 1
            counts = np.bincount(bins, minlength=len(table["step"]))
            if name == "return":
                table["episodes"] = counts
            with np.errstate(invalid="ignore"):  # 0 / 0 where there is nothing
                table[name] = np.bincount(bins, values, minlength=len(counts)) / counts
    summary = {name: record.get(name) for name in ("script", "command", "git", "args")}
    summary["versions"] = {name: record["versions"][name] for name in PACKAGES if name in record.get("versions", {})}
    summary["steps"], summary["episodes"], summary["seconds"] = int(end), len(episodes), None
    summary["score"] = float(np.mean([value for _, value in episodes[-100:]])) if episodes else None
    checkpoint = max(folder.glob("checkpoint-*.pt"), default=None)
    if checkpoint:
        summary["seconds"] = round(torch.load(checkpoint, weights_only=True, mmap=True)["seconds"], 1)
    return SimpleNamespace(folder=folder, record=summary, table=dict(table))


def keep_result(run, results, name):
    """Adds the run to a folder of results: a CSV file of its table, and its record in runs.json."""
    (results / name).parent.mkdir(parents=True, exist_ok=True)
    rows = zip(*run.table.values(), strict=True)
    text = io.StringIO()
    cells = [
        ["" if np.isnan(value) else f"{value:.6g}" if value % 1 else f"{value:.0f}" for value in row] for row in rows
    ]
    csv.writer(text, lineterminator="\n").writerows([run.table, *cells])
    write_atomically(results / f"{name}.csv", text.getvalue())
    folder = os.open(results, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two experiments may end a run at the same time
        records = read_records(results) | {name: run.record}
        valid = json.dumps(dict(sorted(records.items())), indent=1).replace(": Infinity", ": 1e999")  # of --u-bar inf
        write_atomically(results / "runs.json", valid + "\n")
    finally:
        os.close(folder)


def read_records(results):
    """What runs.json says of each run; nothing if it is not there."""
    path = results / "runs.json"
    try:
        records = json.loads(path.read_text()) if path.exists() else {}
        [(record["args"]["seed"], record["steps"]) for record in records.values()]
        return records
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        fail(f"{path} is damaged; move it away or restore it.")


def read_results(results):
    """The runs that a folder of results holds."""
    runs = []
    for name, record in read_records(results).items():
        with open(results / f"{name}.csv", newline="") as file:
            header, *rows = csv.reader(file)
        values = np.array([[float(cell or "nan") for cell in row] for row in rows]).reshape(-1, len(header)).T
        table = dict(zip(header, values, strict=True))
        runs.append(SimpleNamespace(folder=results / name, record=record, table=table))
    return runs


# --- jobs of the studies ---


def load_jobs(path, keys):
    """Finished jobs with such keys, a line of JSON each; a last line that an interruption cut short does not count."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    jobs = []
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            try:
                jobs.append(json.loads(line))
                [jobs[-1][key] for key in keys]
            except (ValueError, KeyError, TypeError):
                fail(f"line {number} of {path} is damaged; remove it, and its job is done again.")
    return jobs


def run_jobs(function, jobs, workers, path):
    """Yields function(job) of all jobs as they end, and adds each to the file at once, as a line of JSON.

    A job that fails is named, and the others go on. Several workers are processes, which Ctrl-C and SIGTERM end too."""
    with open(path, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another process is at the jobs of {path}.")
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # without the line that an interruption cut short
        executor, outcomes = None, ((functools.partial(function, job), job) for job in jobs)
        if workers > 1:
            ignore_ctrl_c = (signal.SIGINT, signal.SIG_IGN)
            handler = signal.signal(
                *ignore_ctrl_c
            )  # for the workers, which the first job starts, from their first moment on
            executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), signal.signal, ignore_ctrl_c)
            futures = {executor.submit(function, job): job for job in jobs}
            signal.signal(signal.SIGINT, handler)
            outcomes = ((future.result, futures[future]) for future in as_completed(futures))
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
        try:
            for outcome, job in outcomes:
                try:
                    result = outcome()
                except BrokenProcessPool:
                    fail("a worker was killed, perhaps as memory ran out; the same command goes on with what is left.")
                except Exception as error:
                    print(f"failed: {', '.join(map(str, job.values()))}: {error}", file=sys.stderr)
                    continue
                file.write(f"{json.dumps(result)}\n".encode())
                file.flush()
                yield result
        finally:
            signal.signal(signal.SIGTERM, handler)
            if executor:
                for worker in multiprocessing.active_children():
                    worker.terminate()
                executor.shutdown(cancel_futures=True)
