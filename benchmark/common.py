"""What the tools of this folder share. (The scripts share nothing: each is whole.)"""

import fcntl
import functools
import json
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import tyro

# Arguments that may change when a run goes on: they do not make it another run.
FREE = ("total_timesteps", "run_dir", "save_every", "resume", "cuda", "track", "wandb_project", "capture_video")


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


def fill(page, name, text):
    """Puts text between the page's lines `<!-- name -->` and `<!-- end -->`."""
    opening, closing = f"<!-- {name} -->\n", "<!-- end -->\n"
    before, rest = page.read_text().split(opening)
    page.write_text(before + opening + text + rest[rest.index(closing) :])


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"the folder {path} cannot be made ({error.strerror}); choose another.")


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
            handler = signal.signal(*ignore_ctrl_c)  # for the workers, which the first job starts, from their first moment on
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
                    fail("a worker was killed, perhaps because memory ran out; the same command goes on with what is left.")
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
