"""Commands as functions, with typed settings. Each function takes the result of a run, its folder, or an agent.

Run it with `python commands.py`.
"""

import zhixing as zx

GOAL = 100.0  # mean return after a short training; the best is 500


def main() -> dict:
    cfg = zx.PPOConfig(env="CartPole-v1", num_envs=4, net=zx.NetConfig(activation="relu"), env_steps=8_192)
    result = zx.train(cfg, out="runs/commands", quiet=True)
    result = zx.resume(result, env_steps=16_384, quiet=True)
    evaluation = zx.evaluate(result, episodes=20)
    print(f"mean return {evaluation.mean_return:.0f}, shortest episode {evaluation.summary()['min_return']:.0f} steps")

    zx.plot(result, "runs/return.png")
    zx.video(result, "runs/balance.mp4", max_steps=100)
    zx.export(result, "runs/agent", episodes=10)
    recorded = zx.collect("runs/agent", "runs/recorded", steps=1_000)
    print(f"recorded {len(recorded)} steps of the exported agent")
    swept = zx.sweep(cfg, {"lr": [1e-3, 3e-3]}, seeds=[0], out="runs/sweep", env_steps=4_096)
    print("best setting:", swept.best)
    return result


if __name__ == "__main__":
    main()
