"""The return model learns known laws: neither collapsed to the mean nor off in the mean."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmark"))
import toy_density


def test_learns_the_laws_of_24_states():
    """Far from what a full-length run reaches, but a collapsed generator has W1 0.8 and coverage 0, a dead mean W1 above 1."""
    found = toy_density.measure(*toy_density.train(toy_density.Args(seed=1, steps=2500)))
    assert found["W1, mean over states"] < 0.35, found
    assert found["W1, floor"] < 0.05
    assert found["error of the mean"] < 0.2, found
    assert 0.7 < found["std, model / true"] < 1.2, found
    assert 0.6 < found["coverage of 80 %"] < 0.9, found
