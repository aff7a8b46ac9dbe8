"""Intervals in episodes and updates, and evaluations of all kept checkpoints, with and without exploration.

Run it with `python evaluation.py`. The command for one checkpoint is `zhixing eval RUN --checkpoint STEP --stochastic`.
"""

import zhixing as zx

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


def main() -> dict:
    result = zx.train(
        "ppo", env="toy/match", env_steps=8_192, num_envs=4, rollout_steps=64, minibatch_size=64, lr=3e-3,
        log_every="100 updates",  # also in steps (1000), episodes or time (60 s)
        eval_every="200 episodes", eval_episodes=20, eval_num_envs=5,
        checkpoint_every="200 episodes", keep_checkpoints=10,
    )  # fmt: skip
    for file in sorted(result.run.glob("checkpoints/0*.safetensors")):
        steps = int(file.stem)
        greedy = zx.evaluate(result, episodes=20, checkpoint=steps, stochastic=False).mean_return
        stochastic = zx.evaluate(result, episodes=20, checkpoint=steps, stochastic=True).mean_return
        print(f"{steps:>6} steps: {greedy:.2f} with the best actions, {stochastic:.2f} with sampled ones")
    return result


if __name__ == "__main__":
    main()
