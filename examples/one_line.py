"""Train PPO on CartPole-v1 with one call. Training ends when 100 evaluation episodes average at least 475.

Run it with `python one_line.py`.
"""

import zhixing as zx

GOAL = 475.0


def main() -> dict:
    return zx.train("ppo", env="CartPole-v1", seed=0, stop_return=GOAL)


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.1f} after {result['env_steps']:,} steps, {result['seconds']:.1f} s of training")
