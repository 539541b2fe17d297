"""Whatever bytes a checkpoint has and whatever words follow a command: one sentence or no harm. The cases are fixed."""

import contextlib
import importlib
import io
import signal
import sys
from typing import NamedTuple

import pytest
import torch
from conftest import SCRIPTS, newest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def fuzz(cases):
    health = list(HealthCheck)  # slow examples and shared fixtures are meant
    return settings(max_examples=cases, derandomize=True, database=None, deadline=None, suppress_health_check=health)


def outcome(call, *args):
    """What the call returns, or None if it is refused in one line and with exit code 2; anything else is raised."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            return call(*args)
        except SystemExit as stop:
            assert stop.code == 2
            assert err.getvalue().startswith("error: ") and len(err.getvalue().splitlines()) == 1, err.getvalue()
            return None


def same(a, b):
    """Equal to the bit, and to the type, whatever is nested in whatever."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


class Original(NamedTuple):
    content: bytes
    checkpoint: dict
    headers: list

    def __repr__(self):
        return "the checkpoint"  # in place of 100 kB in a failure's report


@pytest.fixture(scope="module")
def original(trained):
    """A checkpoint's bytes and content, and where in it the headers of the archive stand."""
    path = newest(trained["ppo_mujoco"])
    content = path.read_bytes()
    headers = [i for i in range(len(content)) if content[i : i + 2] == b"PK"]
    return Original(content, dict(importlib.import_module("ppo_mujoco").load_checkpoint(path)), headers)


def load_damaged(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "checkpoint-000000000064.pt"
    path.write_bytes(content)
    return outcome(importlib.import_module("ppo_mujoco").load_checkpoint, path)


@fuzz(300)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_harmless(original, tmp_path_factory, data):
    """Flipped, overwritten, lost and doubled bytes, anywhere and, as there are few, near the headers of the archive."""
    content, expected, headers = original
    damaged = bytearray(content)
    anywhere = st.integers(0, len(content) - 1)
    near_headers = st.builds(
        lambda at, by: min(at + by, len(content) - 1), st.sampled_from(headers), st.integers(0, 80)
    )
    for at in data.draw(st.lists(anywhere | near_headers, min_size=1, max_size=3)):
        kind = data.draw(st.sampled_from(["flip", "flip", "overwrite", "cut", "double"]))
        if kind == "flip":
            damaged[at % len(damaged)] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "overwrite":
            new = data.draw(st.binary(min_size=1, max_size=16))
            damaged[at : at + len(new)] = new
        elif kind == "cut":
            del damaged[at : at + data.draw(st.integers(1, 4096))]
        else:
            damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 4096))]
        if not damaged:
            break
    checkpoint = load_damaged(bytes(damaged), tmp_path_factory)
    assert checkpoint is None or same(checkpoint, expected)


@fuzz(100)
@given(content=st.binary(max_size=300), zip_header=st.booleans())
def test_any_bytes_are_refused(trained, tmp_path_factory, content, zip_header):
    assert load_damaged(b"PK\x03\x04" * zip_header + content, tmp_path_factory) is None


NAMES = sorted({name for script in SCRIPTS for name in vars(importlib.import_module(script).Args())} - {"resume"})
NUMBERS = st.integers() | st.integers(0, 9).map(lambda digit: int(f"{digit + 1}" * 400)) | st.floats()
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=8)
VALUES = NUMBERS.map(str) | WORDS | st.sampled_from(["nan", "inf", "-inf", "1e999", "-0.0", "True", "None", "sr", "[]"])
OPTION = st.builds(lambda name, value: (f"--{name.replace('_', '-')}", value), st.sampled_from(NAMES), VALUES)


@fuzz(250)
@given(name=st.sampled_from(SCRIPTS), options=st.lists(OPTION, min_size=1, max_size=2), end=st.lists(WORDS, max_size=1))
def test_any_command_line_is_refused_or_checked(name, options, end):
    """Up to the point where training would start."""
    command_line(name, [*(word for option in options for word in option), *end])


@fuzz(100)
@given(name=st.sampled_from(SCRIPTS), path=WORDS | st.sampled_from(["/dev/null", "/dev", "tests"]))
def test_any_folder_to_resume_is_refused(name, path):
    assert command_line(name, [f"--resume={path}"]) == 2


def command_line(name, words):
    """The exit code of `python SCRIPT WORDS`, which is not to train."""
    script = importlib.import_module(name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
        patch.setattr(sys, "argv", [f"{name}.py", *words])
        patch.setattr(script, "train", script.check_args)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                script.main()
        except SystemExit as stop:
            message = err.getvalue()
            assert stop.code == 2 or (stop.code == 0 and {"-h", "--help"} & set(words)), message
            assert "Traceback" not in message and (message.startswith("error: ") or "--help" in message), message
            assert not message.startswith("error: ") or len(message.splitlines()) == 1, message
            return stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0
