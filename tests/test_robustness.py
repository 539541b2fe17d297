"""Signals, full disks, lost readers, second writers and kill -9 of real processes: nothing is lost or half-written.

KILLS=20 python -m pytest tests/test_robustness.py -k kill_9     # more moments than the suite takes
"""

import importlib
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "ppo_mujoco"  # the quickest to start; what is tested here is the same in all, to the letter
TINY = "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --minibatch-size 16 --update-epochs 1 --no-cuda --no-envpool"
BATCH = 32
FOR_EVER = ["--total-timesteps", str(10**9)]
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


def start(*options, ignored=(), limit=resource.RLIM_INFINITY, **popen):
    """The script in a process and session of its own, with the signals of a shell's foreground job."""

    def prepare():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    command = [sys.executable, "-W", "ignore", str(ROOT / f"{SCRIPT}.py"), *map(str, options)]
    popen = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) | popen
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=prepare, **popen)


def fresh(folder, *options):
    return [*TINY.split(), "--run-dir", folder, *options]


def run_folder(folder):
    (path,) = folder.iterdir()
    return path


def steps_of(folder):
    """The newest checkpoint's steps; -1 before there is one."""
    return max((int(path.stem.split("-")[1]) for path in folder.rglob("checkpoint-*.pt")), default=-1)


def wait_for_checkpoint(process, folder, after=-1):
    """Waits for one with more than `after` steps."""
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if steps_of(folder) > after:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no checkpoint: {process.communicate()}")


def load(path):
    """By the script's own function, which verifies checksums and numbers."""
    return importlib.import_module(SCRIPT).load_checkpoint(path)


def assert_all_whole(folder):
    paths = list(folder.rglob("checkpoint-*"))
    assert paths
    for path in paths:
        assert path.suffix == ".pt", f"{path.name} was left behind"
        assert load(path)["global_step"] == int(path.stem.split("-")[1])


# --- signals ---


def test_signals_save_and_say_how_to_go_on(tmp_path):
    """Ctrl-C, `kill` and a closed terminal, one after the other; each time the printed command goes on."""
    options, before = fresh(tmp_path, *FOR_EVER, "--save-every", 1), -1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = start(*options)
        wait_for_checkpoint(process, tmp_path, after=before)
        seen = steps_of(tmp_path)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number and err == ""
        assert_all_whole(tmp_path)
        before = steps_of(tmp_path)
        assert before >= seen and load(run_folder(tmp_path))["iteration"] == before / BATCH
        command = shlex.split(out.splitlines()[-1].split("stopped early; to go on: ")[1])
        assert command[0] == "python" and Path(command[1]).name == f"{SCRIPT}.py"
        options = command[2:]


def test_a_stopped_run_saves_what_it_had_not_saved_yet(tmp_path):
    process = start(*fresh(tmp_path, *FOR_EVER, "--save-every", 10**6))
    process.stdout.readline()  # the first iteration is over
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 129
    assert_all_whole(tmp_path)
    assert steps_of(tmp_path) >= BATCH


def test_second_signal_stops_at_once(tmp_path):
    process = start(*fresh(tmp_path, *FOR_EVER, "--update-epochs", 10**7))  # its first iteration takes hours
    deadline = time.time() + 120
    while not list(tmp_path.rglob("events.out.*")):  # opened after the signals are handled
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT and err == ""  # a shell shows 130
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_nohup_outlives_its_terminal(tmp_path):
    process = start(*fresh(tmp_path, *FOR_EVER, "--save-every", 1), ignored=[signal.SIGHUP])
    wait_for_checkpoint(process, tmp_path)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("library", ["numpy", "libtorch_cpu"])
def test_ctrl_c_during_the_imports_is_quiet(tmp_path, library):
    process = start(*fresh(tmp_path))
    maps = Path(f"/proc/{process.pid}/maps")
    while library not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")  # a shell shows 130
    assert not list(tmp_path.iterdir())


# --- nobody reads, no room to write ---


def close_after_one_line(process):
    """As `| head -1` does."""
    assert process.stdout.readline().startswith("step ")
    process.stdout.close()


@pytest.mark.parametrize("output", ["head", "closed", "full"])
def test_a_lost_standard_output_never_ends_a_run(tmp_path, output):
    options = fresh(tmp_path, "--total-timesteps", 40 * BATCH, "--save-every", 10**6)
    if output == "head":
        process = start(*options)
        close_after_one_line(process)
    elif output == "full":
        with open("/dev/full", "w") as full:
            process = start(*options, stdout=full)
    else:
        shell = ["sh", "-c", 'exec "$0" "$@" >&-', sys.executable, "-W", "ignore", str(ROOT / f"{SCRIPT}.py")]
        process = subprocess.Popen([*shell, *map(str, options)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0 and err == ""
    assert_all_whole(tmp_path)
    assert steps_of(tmp_path) == 40 * BATCH


def test_full_disk_while_a_checkpoint_is_saved(tmp_path):
    """A limit on the size of files, which sets in after the first checkpoints."""
    process = start(*fresh(tmp_path, *FOR_EVER, "--save-every", 1))
    wait_for_checkpoint(process, tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    out, err = process.communicate(timeout=60)
    (line,) = err.splitlines()
    assert process.returncode == 2 and line.startswith("error: ") and "File too large" in line
    assert_all_whole(tmp_path)


def test_full_disk_while_tensorboard_writes(tmp_path):
    process = start(*fresh(tmp_path, *FOR_EVER, "--save-every", 10**6), limit=9000)
    out, err = process.communicate(timeout=60)
    (line,) = err.splitlines()
    assert process.returncode == 2 and line.startswith("error: ") and "File too large" in line
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_disk_that_is_really_full(tmp_path):
    """One of 700 kB, in a mount namespace of its own: it holds the first checkpoints, and no more."""
    disk, after = tmp_path / "disk", tmp_path / "after"
    disk.mkdir(), after.mkdir()
    command = [sys.executable, "-W", "ignore", ROOT / f"{SCRIPT}.py", *fresh(disk, *FOR_EVER, "--save-every", 1)]
    steps = f"mount -t tmpfs -o size=700k tmpfs {disk} || exit 77\n{shlex.join(map(str, command))}\ncode=$?\n"
    steps += f"cp -r {disk}/. {after}; exit $code"
    process = subprocess.run(["unshare", "-rm", "sh", "-c", steps], capture_output=True, text=True, timeout=120)
    if process.returncode in (1, 77):
        pytest.skip(f"no mount namespaces here: {process.stderr}")
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == 2 and len(errors) == 1 and "No space left on device" in errors[0]
    assert_all_whole(after)


# --- two writers, and kill -9 ---


def processes_of(session):
    """Numbers of the processes that belong to it."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_run_has_one_writer(tmp_path):
    """A second --resume is refused while the first process lives, and works when that has been killed."""
    first = start(*fresh(tmp_path, *FOR_EVER, "--save-every", 1))
    wait_for_checkpoint(first, tmp_path)
    folder = run_folder(tmp_path)
    record = (folder / "run.json").read_bytes()
    second = start("--resume", folder)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 2 and out == "" and err == f"error: another process is training in {folder}.\n"
    wait_for_checkpoint(first, tmp_path, after=steps_of(tmp_path))  # undisturbed
    assert (folder / "run.json").read_bytes() == record and len(list(folder.glob("events.out.*"))) == 1
    first.kill()
    first.communicate()
    before = steps_of(tmp_path)
    third = start("--resume", folder, "--total-timesteps", before + 5 * BATCH)
    out, err = third.communicate(timeout=60)
    assert third.returncode == 0 and steps_of(tmp_path) >= before + 4 * BATCH, err


def test_newest_checkpoint_survives_kill_9(tmp_path):
    """At random moments, of a run that does little but save."""
    kills, moments, before = int(os.environ.get("KILLS", 5)), random.Random(0), -1
    for _ in range(kills):
        options = fresh(tmp_path, *FOR_EVER, "--save-every", 1) if before < 0 else ["--resume", run_folder(tmp_path)]
        process = start(*options)
        wait_for_checkpoint(process, tmp_path, after=before)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.communicate()
        assert not processes_of(process.pid), "orphans"
        folder = run_folder(tmp_path)
        assert load(folder)["global_step"] == steps_of(tmp_path) > before
        assert json.loads((folder / "run.json").read_text())["script"] == f"{SCRIPT}.py"
        before = steps_of(tmp_path)
