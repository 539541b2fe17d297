"""Does the return model learn a distribution? Supervised, without reinforcement learning: 24 states, each with a known law of x.

The networks, losses and optimisers are those of bdpg_mujoco.py, with its defaults; only the trunk's input is a fixed random feature
of the state. W1 is in units of each law's standard deviation; the floor is what as many true samples score.

    python benchmark/toy_density.py                      # 6,000 steps, about a minute on a CPU
    python benchmark/toy_density.py --law-coef 0        # the paper's regression alone
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bdpg_mujoco as bdpg

NUM_STATES, NUM_FEATURES = 24, 8


@dataclass
class Args:
    seed: int = 1
    """seed of networks and samples (the laws are always the same)"""
    steps: int = 6000
    """gradient steps; every learning rate goes linearly to 0"""
    steps_per_rollout: int = 160
    """steps for which b(s) and w stay as they are, as between two rollouts"""
    law_coef: float = bdpg.Args.law_coef
    """as in the script"""
    r1_coef: float = bdpg.Args.r1_coef
    """as in the script"""
    adversarial_learning_rate: float = bdpg.Args.adversarial_learning_rate
    """as in the script"""


class Laws:
    """Normal, exponential, bimodal and uniform laws with locations in ±3 and scales from 0.15 to 1."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        uniform = torch.rand(2, NUM_STATES, generator=generator)
        self.location = 6 * uniform[0] - 3
        self.scale = 0.15 * (1 / 0.15) ** uniform[1]
        self.features = torch.randn(NUM_STATES, NUM_FEATURES, generator=generator)

    def sample(self, states):
        normal = torch.randn(states.shape)
        shapes = [
            normal,
            torch.empty(states.shape).exponential_() - 1,
            (torch.sign(torch.rand(states.shape) - 0.5) + 0.25 * normal) / (1 + 0.25**2) ** 0.5,
            12**0.5 * (torch.rand(states.shape) - 0.5),
        ]
        return self.location[states] + self.scale[states] * torch.stack(shapes).gather(0, (states % 4).unsqueeze(0))[0]


def train(args):
    """A trunk and a return model, trained as bdpg_mujoco.py does."""
    torch.manual_seed(args.seed)
    laws, script_args = Laws(), bdpg.Args(adversarial_learning_rate=args.adversarial_learning_rate)
    space = bdpg.gym.spaces.Box(-1, 1, (NUM_FEATURES,))
    envs = type("Spaces", (), {"single_observation_space": space, "single_action_space": space})
    agent = bdpg.Agent(envs, script_args)
    model, optimizers = agent.return_model, bdpg.make_optimizers(agent, script_args)
    for step in range(args.steps):
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = (1 - step / args.steps) * group["initial_lr"]
        if step % args.steps_per_rollout == 0:
            with torch.no_grad():
                rollout = torch.randint(NUM_STATES, (4096,))
                centres = model.centre(agent.trunk(laws.features))
                model.track_residuals(laws.sample(rollout) - centres[rollout])
        states = torch.randint(NUM_STATES, (script_args.minibatch_size,))
        x, c = laws.sample(states), agent.trunk(laws.features[states])
        joints, z_tilde, x_tilde, z_prime = bdpg.sample_joints(model, x, centres[states], c.detach())
        d_loss, _ = bdpg.discriminator_loss(model, joints, c.detach(), 8 * args.r1_coef if step % 8 == 0 else 0)
        bdpg.descend(optimizers["discriminator"], d_loss, script_args.max_grad_norm)
        q_loss = bdpg.encoder_prior_loss(model, joints, c.detach())
        bdpg.descend(optimizers["encoder and prior"], q_loss, script_args.max_grad_norm)
        g_loss = sum(bdpg.generator_losses(model, x, x_tilde, z_tilde, z_prime, c, args.law_coef))
        bdpg.descend(optimizers["policy, trunk and generator"], script_args.vf_coef * g_loss, script_args.max_grad_norm)
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


if __name__ == "__main__":
    for name, value in measure(*train(tyro.cli(Args, description=__doc__))).items():
        print(f"{name:22s}{value:.3f}")
