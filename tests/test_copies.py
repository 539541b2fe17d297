"""Each script is complete, so shared code stands in several files; the copies must not drift."""

import ast
import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TASK = {"Args", "make_envs", "reset_envs", "step_envs", "Trunk", "Policy", "Agent", "train"}  # what Atari and MuJoCo do differently
CRITIC = {"Args", "check_args", "ReturnModel", "Agent", "make_optimizers", "train"}  # what a scalar critic does differently
PAIRS = [
    ("bdpg_atari.py", "bdpg_mujoco.py", TASK),
    ("bdpg_atari.py", "benchmark/ppo_scalar_atari.py", CRITIC),
    ("bdpg_mujoco.py", "benchmark/ppo_scalar_mujoco.py", CRITIC),
]


def definitions(file):
    source = (ROOT / file).read_text()
    nodes = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


@pytest.mark.parametrize("one, other, own", PAIRS)
def test_functions_and_classes_of_the_same_name_are_identical(one, other, own):
    a, b = definitions(one), definitions(other)
    shared = (a.keys() & b.keys()) - own
    assert len(shared) > 15
    for name in sorted(shared):
        drift = difflib.unified_diff(a[name].splitlines(), b[name].splitlines(), one, other, lineterm="")
        assert a[name] == b[name], "\n".join([f"{name} has drifted; make the copies equal:", *drift])


@pytest.mark.parametrize("one, other, own", PAIRS)
def test_the_same_argument_has_the_same_help(one, other, own):
    def helps(file):
        lines = definitions(file)["Args"].splitlines()
        return {a.split(":")[0]: b for a, b in zip(lines, lines[1:], strict=False) if b.strip().startswith('"""')}

    a, b = helps(one), helps(other)
    assert len(a.keys() & b.keys()) > 15
    assert {name: a[name] for name in a.keys() & b.keys()} == {name: b[name] for name in a.keys() & b.keys()}
