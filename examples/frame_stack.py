"""Stacks of observations: balance a pole without observing its velocity, which the last four angles reveal.

`env.stack` works for every environment. A replay buffer stores each observation once. Run it with
`python frame_stack.py`.
"""

import numpy as np

import zhixing as zx

GOAL = 195.0  # of 500 steps; random actions balance the pole for 22


def main(stack: int = 4) -> dict:
    result = zx.train(
        "ppo", env="toy/cartpole-no-velocity", env__stack=stack, preset=False, env_steps=20_000,
        stop_return=GOAL, num_envs=8, rollout_steps=32, minibatch_size=256, lr=3e-3, gamma=0.98, gae_lambda=0.9,
        eval_every=4_096,
    )  # fmt: skip
    agent = zx.load(result)
    for angle in (0.02, 0.01, 0.0):  # falling to the left: a single angle of 0 doesn't tell
        obs = np.float32([0.0, angle])
        action = agent.act(agent.preprocess(obs) if stack > 1 else obs)  # the agent makes the stacks
    print(f"action at angle 0: {action}")
    return result


if __name__ == "__main__":
    print(f"balanced for {main()['final_return']:.0f} steps")
