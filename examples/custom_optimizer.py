"""A custom optimizer and a custom schedule: Lion, with a warm-up of the learning rate.

`zhixing train` accepts them as `optimizer=custom_optimizer:Lion lr_schedule=custom_optimizer:warmup`. Run it with
`python custom_optimizer.py`.
"""

import torch

import zhixing as zx

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023) moves every weight by the learning rate, in the direction of the momentum's sign."""

    def __init__(self, parameters, lr: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]  # saved in checkpoints
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                weight.add_(momentum.lerp(weight.grad, 1 - group["beta1"]).sign(), alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1 - group["beta2"])


def warmup(fraction: float) -> float:
    """Return the factor of the learning rate at a used fraction of the budget: up to 1 at 10 %, then down to 0."""
    return min(fraction / 0.1, (1.0 - fraction) / 0.9)


def main() -> dict:
    return zx.train(
        "ppo", env="toy/match", env_steps=20_000, lr=1e-3, optimizer=Lion, lr_schedule=warmup,
        entropy_coef=0.01, entropy_coef_schedule="linear", eval_every=2_000, stop_return=GOAL,
    )  # fmt: skip


if __name__ == "__main__":
    main()
