"""Share an agent on the Hugging Face Hub: upload it with a model card, download it, and evaluate what came back.

    hf auth login
    python hub.py USER/cartpole-ppo

The extra `hub` installs what this needs.
"""

import sys

import zhixing as zx


def main(repo: str) -> dict:
    result = zx.train("ppo", env="CartPole-v1", env_steps=8_192, eval_video=True, out="runs/pole")
    print("model card and video:", zx.push(result, repo, episodes=20))
    folder = zx.pull(repo, "runs/pulled")  # executes nothing from the repository
    print(f"mean return {zx.evaluate(folder, episodes=20).mean_return:.0f}")
    return result


if __name__ == "__main__":
    main(sys.argv[1])
