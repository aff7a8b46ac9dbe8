"""Names of settings in other libraries and what they are called here.

An error about an unknown setting names the library, and the command line translates options such as
`--total-timesteps 1000` where the meaning is the same.
"""

from __future__ import annotations

from typing import NamedTuple

SB3, CLEANRL, TIANSHOU, RLLIB, MINDRL = "Stable-Baselines3", "CleanRL", "Tianshou", "RLlib", "MindSpore RL"


class OtherName(NamedTuple):
    """A setting of other libraries."""

    libraries: tuple[str, ...]
    here: tuple[str, ...]  # settings by dotted name, the first one that an algorithm has counts; or an option
    difference: str = ""  # what to write instead where the value differs, too

    def sentence(self, name: str, setting: str | None) -> str:
        """Return for example "`n_steps` (Stable-Baselines3) is `rollout_steps` here"."""
        where = f"`{name}` ({', '.join(self.libraries)})"
        if setting is None:
            return f"{where} is not a setting here: {self.difference}"
        return f"{where} is `{setting}` here" + (f": {self.difference}" if self.difference else "")


def _same(here: str, **names: tuple[str, ...]) -> dict[str, OtherName]:
    """Names with the same meaning and unit as the setting `here`."""
    return {name: OtherName(libraries, tuple(here.split())) for name, libraries in names.items()}


def _differs(here: str, difference: str, **names: tuple[str, ...]) -> dict[str, OtherName]:
    """Names whose value must be converted, with the sentence that says how."""
    return {name: OtherName(libraries, tuple(here.split()), difference) for name, libraries in names.items()}


_BOTH = (SB3, CLEANRL)

OTHER_NAMES: dict[str, OtherName] = {
    # budget and environments
    **_same("env_steps", total_timesteps=_BOTH, timesteps_total=(RLLIB,), num_env_steps_sampled_lifetime=(RLLIB,)),
    **_differs(
        "env_steps",
        "epochs times steps per epoch",
        max_epoch=(TIANSHOU,),
        max_epochs=(TIANSHOU,),
        epoch=(TIANSHOU,),
        step_per_epoch=(TIANSHOU,),
        epoch_num_steps=(TIANSHOU,),
    ),
    **_same("episodes", episode=(MINDRL,), episodes_total=(RLLIB,)),
    **_same("stop_return", reward_threshold=(TIANSHOU, SB3), stop_reward=(RLLIB,)),
    **_same("env", env_id=_BOTH, gym_id=(CLEANRL,), task=(TIANSHOU,), environment=(RLLIB,)),
    **_same(
        "num_envs",
        n_envs=(SB3,),
        training_num=(TIANSHOU,),
        num_train_envs=(TIANSHOU,),
        num_training_envs=(TIANSHOU,),
        collect_env_num=(MINDRL,),
    ),
    **_differs(
        "num_envs",
        "the number of all environments",
        num_envs_per_env_runner=(RLLIB,),
        num_envs_per_worker=(RLLIB,),
    ),
    **_differs(
        "vector.workers",
        "the number of processes that share the num_envs environments, with vector.backend=process",
        num_env_runners=(RLLIB,),
        num_rollout_workers=(RLLIB,),
        num_workers=(RLLIB,),
    ),
    # rollouts and updates
    **_same("replay.n_step rollout_steps", n_steps=(SB3,)),
    **_same("rollout_steps train_every", num_steps=(CLEANRL,), rollout_fragment_length=(RLLIB,)),
    **_same("train_every rollout_steps", train_freq=(SB3,), train_frequency=(CLEANRL,)),
    **_differs(
        "rollout_steps train_every",
        "steps of each environment, not over all of them",
        step_per_collect=(TIANSHOU,),
        collection_step_num_env_steps=(TIANSHOU,),
        train_batch_size=(RLLIB,),
        train_batch_size_per_learner=(RLLIB,),
    ),
    **_same("updates_per_step", update_per_step=(TIANSHOU,)),
    **_same("updates_per_step", update_step_num_gradient_steps_per_sample=(TIANSHOU,)),
    **_differs("updates_per_step", "gradient_steps / train_freq", gradient_steps=(SB3,)),
    **_same(
        "learning_starts",
        start_timesteps=(TIANSHOU,),
        num_steps_sampled_before_learning_starts=(RLLIB,),
        init_collect_size=(MINDRL,),
    ),
    **_same("minibatch_size", batch_size=(SB3, TIANSHOU), sgd_minibatch_size=(RLLIB,)),
    **_same("batch_size", sample_size=(MINDRL,)),
    **_differs("minibatch_size", "rollout_steps x num_envs / num_minibatches", num_minibatches=(CLEANRL,)),
    **_same("epochs", n_epochs=(SB3,), update_epochs=(CLEANRL,), repeat_per_collect=(TIANSHOU,)),
    **_same("epochs", update_step_num_repetitions=(TIANSHOU,), iter_times=(MINDRL,)),
    **_same("epochs", num_epochs=(RLLIB,), num_sgd_iter=(RLLIB,)),
    # learning rates, losses
    **_same("lr", learning_rate=_BOTH, q_lr=(CLEANRL,)),
    **_same("actor_lr", policy_lr=(CLEANRL,)),
    **_same("optimizer_eps", adam_epsilon=(RLLIB,), rms_prop_eps=(SB3,)),
    **_same("gamma", discount_factor=(TIANSHOU,)),
    **_same("gae_lambda", lambda_=(RLLIB,)),
    **_same("clip_range", clip_coef=(CLEANRL,), eps_clip=(TIANSHOU,), clip_param=(RLLIB,)),
    **_same("clip_range", epsilon=(MINDRL,)),
    **_same("value_clip_range", clip_range_vf=(SB3,), vf_clip_param=(RLLIB,)),
    **_differs("value_clip_range", "the range as a number, or none", clip_vloss=(CLEANRL,)),
    **_same("entropy_coef alpha", ent_coef=(SB3, CLEANRL, TIANSHOU), entropy_coeff=(RLLIB,)),
    **_same("value_coef", vf_coef=(SB3, CLEANRL, TIANSHOU), vf_loss_coeff=(RLLIB,), critic_coef=(MINDRL,)),
    **_same("max_grad_norm", grad_clip=(RLLIB,)),
    **_same("normalize_advantage", norm_adv=(CLEANRL, TIANSHOU)),
    **_same("normalize_reward", rew_norm=(TIANSHOU,), reward_normalization=(TIANSHOU,), norm_reward=(SB3,)),
    **_same("normalize_obs", norm_obs=(SB3,)),
    **_differs("log_std_init", "the logarithm of the standard deviation", sigma_init_std=(MINDRL,)),
    # value learning and replay
    **_same("replay.capacity capacity", buffer_size=(SB3, CLEANRL, TIANSHOU), capacity=(MINDRL,)),
    **_same("replay.n_step", estimation_step=(TIANSHOU,), n_step_return_horizon=(TIANSHOU,), n_step=(RLLIB,)),
    **_same("target_update_interval", target_update_freq=(TIANSHOU,)),
    **_differs(
        "target_update_interval",
        "counted in updates, not in environment steps",
        target_network_frequency=(CLEANRL,),
        target_network_update_freq=(RLLIB,),
    ),
    **_same("tau", update_factor=(MINDRL,)),
    **_same("epsilon_fraction", exploration_fraction=_BOTH),
    **_differs("epsilon_fraction", "a share of the budget, not a number of steps", decay=(MINDRL,)),
    **_same("epsilon_start", exploration_initial_eps=(SB3,), start_e=(CLEANRL,), epsi_high=(MINDRL,)),
    **_same("epsilon_start", eps_train=(TIANSHOU,)),
    **_same("epsilon_end", exploration_final_eps=(SB3,), end_e=(CLEANRL,), epsi_low=(MINDRL,)),
    **_same("epsilon_end", eps_train_final=(TIANSHOU,)),
    **_same("eval_epsilon", eps_test=(TIANSHOU,)),
    **_same("atoms", n_atoms=(CLEANRL,), num_atoms=(TIANSHOU, RLLIB)),
    **_same("quantiles", n_quantiles=(SB3,), num_quantiles=(TIANSHOU,)),
    **_differs("algorithm", "double_dqn", double_q=(RLLIB,), is_double=(TIANSHOU,)),
    **_differs("algorithm", "dueling_dqn", dueling=(RLLIB,)),
    # continuous actions
    **_same("policy_delay", policy_frequency=(CLEANRL,), update_actor_freq=(TIANSHOU,)),
    **_differs("exploration_noise", "the standard deviation as a number", action_noise=(SB3,)),
    **_same("target_policy_noise", policy_noise=(CLEANRL, TIANSHOU)),
    **_same("target_noise_clip", noise_clip=(CLEANRL, TIANSHOU)),
    **_differs("alpha", "none learns it, a number fixes it", autotune=(CLEANRL,), auto_alpha=(TIANSHOU,)),
    **_same("critics", n_critics=(SB3,)),
    # trust regions
    **_same("max_kl", target_kl=(SB3,), max_kl_divergence=(TIANSHOU,)),
    **_same("cg_iterations", cg_max_steps=(SB3,)),
    **_same("damping", cg_damping=(SB3,)),
    **_same("critic_epochs", n_critic_updates=(SB3,), optim_critic_iters=(TIANSHOU,)),
    # networks
    **_same("net.hidden_sizes", hidden_sizes=(TIANSHOU,), net_arch=(SB3,), fcnet_hiddens=(RLLIB,)),
    **_differs(
        "net.hidden_sizes",
        "a list, such as [100, 100]",
        hidden_size=(MINDRL,),
        hidden_size1=(MINDRL,),
        hidden_size2=(MINDRL,),
    ),
    **_same("net.activation", fcnet_activation=(RLLIB,)),
    **_differs("net.activation", "a name, such as tanh or relu", activation_fn=(SB3,)),
    **_differs("net", "a group, such as net.hidden_sizes=[64,64]", policy_kwargs=(SB3,)),
    **_differs("net.recurrent", "none, gru or lstm", use_lstm=(RLLIB,)),
    **_same("net.recurrent_size", lstm_cell_size=(RLLIB,)),
    # evaluation, files, devices
    **_same("eval_episodes", n_eval_episodes=(SB3,), episode_per_test=(TIANSHOU,), evaluation_duration=(RLLIB,)),
    **_same(
        "eval_episodes",
        num_evaluate_episode=(MINDRL,),
        num_eval_episode=(MINDRL,),
        test_num=(TIANSHOU,),
        num_test_envs=(TIANSHOU,),
    ),
    **_differs(
        "eval_every_steps",
        "counted in environment steps over all environments",
        eval_freq=(SB3,),
        evaluation_interval=(RLLIB,),
        eval_per_episode=(MINDRL,),
    ),
    **_differs(
        "checkpoint_every_steps",
        "counted in environment steps over all environments",
        save_freq=(SB3,),
        save_per_episode=(MINDRL,),
        num_save_episode=(MINDRL,),
    ),
    **_same("eval_video", capture_video=(CLEANRL,)),
    **_differs("device", "cpu or cuda", cuda=(CLEANRL,), num_gpus=(RLLIB,), num_gpus_per_learner=(RLLIB,)),
    **_differs(
        "--out",
        "the run's folder, which holds logs and checkpoints",
        exp_name=(CLEANRL,),
        logdir=(TIANSHOU,),
        ckpt_path=(MINDRL,),
        save_path=(SB3,),
    ),
    **_differs("tensorboard", "true or false; events are in the run's folder", tensorboard_log=(SB3,)),
    **_differs("", "it is read from the environment", state_space_dim=(MINDRL,), action_space_dim=(MINDRL,)),
    **_differs("", "runs with the same seed are always equal on the CPU", torch_deterministic=(CLEANRL,)),
}
