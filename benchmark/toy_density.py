"""Does a return model learn a distribution? Supervised, without reinforcement learning: 24 states, each with a known law of x.

Networks, losses, optimisers and arguments are those of the MuJoCo scripts (PPO+QR gets the trunk of MuJoCo), though many arguments
play no part here; only the trunk's input is a fixed random feature of the state. W1 is in units of each law's standard deviation;
the floor is what as many true samples score.

    python benchmark/toy_density.py bdpg                     # about a minute on a CPU
    python benchmark/toy_density.py bdpg --law-coef 0        # the paper's regression alone
    python benchmark/toy_density.py wgan --mean-coef 0 --seed 2
    python benchmark/toy_density.py qr --num-quantiles 16
"""

import sys
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark import return_distributions as bench
from benchmark.common import fail

NUM_STATES, STEPS, STEPS_PER_ROLLOUT = 24, 6000, 160  # b(s) and w stay as they are between two rollouts


class Laws:
    """Normal, exponential, bimodal and uniform laws with locations in ±3 and scales from 0.15 to 1."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        uniform = torch.rand(2, NUM_STATES, generator=generator)
        self.location = 6 * uniform[0] - 3
        self.scale = 0.15 * (1 / 0.15) ** uniform[1]
        self.features = torch.randn(NUM_STATES, bench.NUM_FEATURES, generator=generator)

    def sample(self, states):
        normal = torch.randn(states.shape)
        shapes = [
            normal,
            torch.empty(states.shape).exponential_() - 1,
            (torch.sign(torch.rand(states.shape) - 0.5) + 0.25 * normal) / (1 + 0.25**2) ** 0.5,
            12**0.5 * (torch.rand(states.shape) - 0.5),
        ]
        return self.location[states] + self.scale[states] * torch.stack(shapes).gather(0, (states % 4).unsqueeze(0))[0]


def train(critic, args, steps=STEPS):
    """A trunk and a return model, trained as the script does."""
    torch.manual_seed(args.seed)
    laws, agent, descend = Laws(), bench.make_agent(critic, args), bench.SCRIPTS[critic].descend
    model, optimizers = agent.return_model, bench.SCRIPTS[critic].make_optimizers(agent, args)
    centres = torch.zeros(NUM_STATES)
    for step in range(steps):
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = (1 - step / steps) * group["initial_lr"]
        if step % STEPS_PER_ROLLOUT == 0 and critic in ("bdpg", "wgan"):
            with torch.no_grad():
                rollout = torch.randint(NUM_STATES, (4096,))
                centres = model.centre(agent.trunk(laws.features))
                model.track_residuals(laws.sample(rollout) - centres[rollout])
        states = torch.randint(NUM_STATES, (args.minibatch_size,))
        x, c = laws.sample(states), agent.trunk(laws.features[states])
        loss = bench.UPDATES[critic](agent, optimizers, args, step, c, x, centres[states])
        descend(optimizers["policy, trunk and generator"], args.vf_coef * loss, args.max_grad_norm)
    return agent, laws


def measure(agent, laws, num_samples=2000):
    states = torch.arange(NUM_STATES).expand(num_samples, NUM_STATES)
    with torch.no_grad():
        samples = agent.return_model.sample(agent.trunk(laws.features), num_samples)
    x, again = laws.sample(states), laws.sample(states)
    low, high = samples.quantile(torch.tensor([0.1, 0.9]), 0)

    def w1(a, b):
        return (a.sort(0).values - b.sort(0).values).abs().mean(0) / laws.scale

    return {
        "W1, mean over states": w1(samples, x).mean().item(),
        "W1, worst state": w1(samples, x).max().item(),
        "W1, floor": w1(again, x).mean().item(),
        "error of the mean": ((samples.mean(0) - laws.location) / laws.scale).abs().mean().item(),
        "std, model / true": (samples.std(0) / laws.scale).mean().item(),
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
    args = tyro.cli(type(default), default=default, args=sys.argv[2:], prog=f"{Path(__file__).name} {critic}", description=__doc__)
    bench.SCRIPTS[critic].check_args(args)
    torch.set_num_threads(1)
    for name, value in measure(*train(critic, args)).items():
        print(f"{name:22s}{value:.3f}")


if __name__ == "__main__":
    main()
