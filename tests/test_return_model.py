"""The return models learn known distributions: neither collapsed to the mean nor off in the mean."""

import subprocess
import sys
from pathlib import Path

import pytest

from studies import return_distributions, toy_density

TOOL = Path(toy_density.__file__)


@pytest.mark.parametrize("critic, steps", [("bdpg", 1500), ("wgan", 1500), ("qr", toy_density.STEPS)])
def test_learns_the_distributions_of_24_states(critic, steps):
    """BDPG reaches more in a full run, but a collapsed generator has W1 0.8 and coverage 0, a dead mean W1 above 1."""
    args = return_distributions.default_args(critic)
    found = toy_density.measure(*toy_density.train(critic, args, steps))
    assert found["W1, mean over states"] < 0.35, found
    assert found["W1, floor"] < 0.05
    assert found["error of the mean"] < 0.2, found
    assert 0.7 < found["std, model / true"] < 1.2, found
    assert 0.6 < found["coverage of 80 %"] < 0.9, found


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([], "error: say first whose return model, one of bdpg, wgan, qr, scalar;"),
        (["dqn"], "error: say first whose return model, one of bdpg, wgan, qr, scalar;"),
        (["wgan", "--mean-coef", "-1"], "error: --mean-coef must lie between 0 and 1e+30, not be -1.0."),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    result = subprocess.run([sys.executable, TOOL, *wrong], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith(message) and "Traceback" not in result.stderr
