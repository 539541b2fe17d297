"""What the tools of benchmark/ share: jobs that are never lost, whatever ends them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmark import common

ROOT = Path(__file__).parent.parent


def root_of(job):
    return job | {"root": math.sqrt(job["n"])}


STUDY = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmark.common import run_jobs

def double(job):
    if job["n"] == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(job["sleep"])
    return job | {{"twice": 2 * job["n"]}}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with Ctrl-C ignored
    jobs = [{{"n": 1, "sleep": 0}}, {{"n": 2, "sleep": 0}}, {{"n": 3, "sleep": 60}}, {{"n": 4, "sleep": 60}}]
    try:
        for result in run_jobs(double, jobs, 2, Path("jobs.jsonl")):
            print(result["n"], flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


def children_of(pid):
    """Processes whose parent it is, by number."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number, to_group", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_the_workers_too_and_keeps_what_is_done(tmp_path, number, to_group):
    (tmp_path / "study.py").write_text(STUDY.format(root=str(ROOT), killed=None))
    options = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen([sys.executable, "study.py"], **options) as study:
        assert {study.stdout.readline(), study.stdout.readline()} == {"1\n", "2\n"}
        workers = children_of(study.pid)
        assert len(workers) >= 2
        (os.killpg if to_group else os.kill)(study.pid, number)  # Ctrl-C reaches all of a terminal, `kill` one
        _, err = study.communicate(timeout=20)
    assert study.returncode == 130 and "Traceback" not in err, err
    deadline = time.time() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.time() < deadline, "a worker lives on"
        time.sleep(0.05)
    assert sorted(job["twice"] for job in common.load_jobs(tmp_path / "jobs.jsonl", ["n"])) == [2, 4]


def test_a_worker_that_is_killed_ends_the_study_in_a_sentence(tmp_path):
    (tmp_path / "study.py").write_text(STUDY.format(root=str(ROOT), killed=3))
    study = subprocess.run([sys.executable, "study.py"], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert study.returncode == 2 and study.stderr.startswith("error: a worker was killed")
    assert study.stderr.count("\n") == 1
    assert sorted(job["twice"] for job in common.load_jobs(tmp_path / "jobs.jsonl", ["n"])) == [2, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_fails_is_named_and_the_others_are_done(tmp_path, capsys, workers):
    jobs, path = [{"n": n, "kind": "root"} for n in (4.0, -1.0, 9.0)], tmp_path / "jobs.jsonl"
    results = common.run_jobs(root_of, jobs, workers, path)
    assert sorted(job["root"] for job in results) == [2, 3]
    assert sorted(job["root"] for job in common.load_jobs(path, ["root"])) == [2, 3]
    assert capsys.readouterr().err == "failed: -1.0, root: math domain error\n"


def test_two_calls_do_not_do_the_same_jobs(tmp_path, capsys):
    path = tmp_path / "jobs.jsonl"
    first = common.run_jobs(lambda job: job, [{"n": 1}, {"n": 2}], 1, path)
    assert next(first) == {"n": 1}
    with pytest.raises(SystemExit, match="2"):
        next(common.run_jobs(lambda job: job, [{"n": 1}], 1, path))
    assert "another process is at the jobs" in capsys.readouterr().err
    assert list(first) == [{"n": 2}] and common.load_jobs(path, ["n"]) == [{"n": 1}, {"n": 2}]


def test_a_damaged_line_is_named_and_a_half_written_one_taken_out(tmp_path, capsys):
    path = tmp_path / "jobs.jsonl"
    half_written = json.dumps({"n": 1}) + "\n" + json.dumps({"n": 2})[:4]
    path.write_text(half_written)
    assert common.load_jobs(path, ["n"]) == [{"n": 1}]
    assert path.read_text() == half_written  # another process may be writing it
    assert list(common.run_jobs(lambda job: job, [{"n": 3}], 1, path)) == [{"n": 3}]
    assert path.read_text() == '{"n": 1}\n{"n": 3}\n'
    for damaged in ("<<<<<<< HEAD", '{"m": 1}', "1"):
        path.write_text(f'{{"n": 1}}\n{damaged}\n{{"n": 2}}\n')
        with pytest.raises(SystemExit, match="2"):
            common.load_jobs(path, ["n"])
        assert "line 2 of" in capsys.readouterr().err and damaged in path.read_text()


@dataclass
class NoArgs:
    """A tool without arguments."""


def raise_this(error):
    raise error


@pytest.mark.parametrize(
    "error, code, words",
    [
        (FileNotFoundError(2, "No such file or directory", "/proc/x.png"), 2, "error: /proc/x.png: No such file"),
        (OSError("out of luck"), 2, "error: the system: out of luck."),
        (KeyboardInterrupt(), 130, "stopped; the same command goes on"),
    ],
)
def test_what_stops_a_tool_is_said_in_a_sentence(error, code, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tool"])
    with pytest.raises(SystemExit) as end:
        common.start(lambda args: raise_this(error), NoArgs, "")
    err = capsys.readouterr().err
    assert end.value.code == code and err.startswith(words) and err.count("\n") == 1


def test_a_tool_whose_output_nobody_reads_any_more_ends_quietly():
    tool = [sys.executable, str(ROOT / "benchmark" / "run.py"), "--preset", "ablation", "--dry-run"]
    with subprocess.Popen(tool, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        common.make_folder(tmp_path / "file" / "below")
    assert "cannot be made (Not a directory)" in capsys.readouterr().err
