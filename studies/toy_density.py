"""Does a return model learn a distribution? 24 states, in each of which an episode ends with a reward of a known one.

The scripts' own train(), on states whose Bellman target is the reward itself, so that nothing is bootstrapped; the
policy rests. W1 is in units of each distribution's standard deviation; the floor is what as many true samples score.

    python studies/toy_density.py bdpg                     # about a minute on a CPU
    python studies/toy_density.py bdpg --energy-coef 0     # the paper's regression alone
    python studies/toy_density.py wgan --mean-coef 0 --seed 2
    python studies/toy_density.py qr --num-quantiles 16
"""

import sys
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import fail
from studies import return_distributions as bench

NUM_STATES, STEPS = 24, 6000


class OneStep:
    """Normal, exponential, bimodal and uniform rewards with locations in ±3 and scales from 0.15 to 1."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        uniform = torch.rand(2, NUM_STATES, generator=generator)
        self.location = 6 * uniform[0] - 3
        self.scale = 0.15 * (1 / 0.15) ** uniform[1]
        self.features = torch.randn(NUM_STATES, bench.NUM_FEATURES, generator=generator)
        self.start = torch.arange(NUM_STATES)

    def sample(self, states):
        normal = torch.randn(states.shape)
        shapes = [
            normal,
            torch.empty(states.shape).exponential_() - 1,
            (torch.sign(torch.rand(states.shape) - 0.5) + 0.25 * normal) / (1 + 0.25**2) ** 0.5,
            12**0.5 * (torch.rand(states.shape) - 0.5),
        ]
        return self.location[states] + self.scale[states] * torch.stack(shapes).gather(0, (states % 4).unsqueeze(0))[0]

    def step(self, states):
        return self.sample(states), torch.full_like(states, bench.END)


def train(critic, args, steps=STEPS):
    process = OneStep()
    return bench.train_on(process, critic, args, steps), process


def measure(agent, process, num_samples=2000):
    states = process.start.expand(num_samples, NUM_STATES)
    samples = bench.sample_returns(agent, process, num_samples).float()
    x, again = process.sample(states), process.sample(states)
    low, high = samples.quantile(torch.tensor([0.1, 0.9]), 0)

    def w1(a, b):
        return (a.sort(0).values - b.sort(0).values).abs().mean(0) / process.scale

    return {
        "W1, mean over states": w1(samples, x).mean().item(),
        "W1, worst state": w1(samples, x).max().item(),
        "W1, floor": w1(again, x).mean().item(),
        "error of the mean": ((samples.mean(0) - process.location) / process.scale).abs().mean().item(),
        "std, model / true": (samples.std(0) / process.scale).mean().item(),
        "coverage of 80 %": ((low <= x) & (x <= high)).float().mean().item(),
    }


def main():
    critics = list(bench.SCRIPTS)
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if len(sys.argv) < 2 or sys.argv[1] not in critics:
        fail(f"say first whose return model, one of {', '.join(critics)}; then arguments of its script.")
    critic = sys.argv[1]
    default = bench.default_args(critic)
    prog = f"{Path(__file__).name} {critic}"
    args = tyro.cli(type(default), default=default, args=sys.argv[2:], prog=prog, description=__doc__)
    bench.SCRIPTS[critic].check_args(args)
    torch.set_num_threads(1)
    for name, value in measure(*train(critic, args)).items():
        print(f"{name:22s}{value:.3f}")


if __name__ == "__main__":
    main()
