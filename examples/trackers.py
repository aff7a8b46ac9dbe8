"""Log a run to Weights & Biases, offline, and to MLflow, in a database on this machine.

pip install '.[wandb,mlflow]'
python trackers.py
wandb sync wandb/offline-run-*                        # uploads the run, after `wandb login`
mlflow server --backend-store-uri sqlite:///mlflow.db  # shows the run; needs `pip install mlflow`
"""

import os

import zhixing as zx

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


def main() -> dict:
    os.environ.setdefault("WANDB_MODE", "offline")
    result = zx.train(
        "ppo", env="toy/match", env_steps=8_192, num_envs=4, rollout_steps=64, minibatch_size=64, lr=3e-3,
        log_every=1_024, eval_every=2_048, out="runs/tracked", wandb="match", mlflow="sqlite:///mlflow.db",
    )  # fmt: skip

    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///mlflow.db")
    experiment = client.get_experiment_by_name("zhixing")
    run = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]
    for metric in client.get_metric_history(run.info.run_id, "eval/mean_return"):
        print(f"{metric.step:>6} steps: {metric.value:.2f}")
    return result


if __name__ == "__main__":
    main()
