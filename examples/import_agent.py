"""Import an agent of Stable-Baselines3, evaluate and film it, and train it further.

    python import_agent.py model.zip CartPole-v1

`model.save("model")` of Stable-Baselines3 writes such a file. The pickles in it aren't read, so nothing is executed.
"""

import sys

import zhixing as zx


def main(file: str, env: str) -> dict:
    agent = zx.import_agent(file, env=env, out="runs/imported", num_envs=4)
    print(f"{agent.cfg.algorithm}: mean return {zx.evaluate('runs/imported', episodes=10).mean_return:.0f}")
    zx.video("runs/imported", "runs/imported.mp4")
    cfg = zx.config.load("runs/imported/config.yaml", init_from="runs/imported", env_steps=4_096)
    return zx.train(cfg, out="runs/further")


if __name__ == "__main__":
    print(f"mean return {main(*sys.argv[1:])['final_return']:.0f} after training further")
