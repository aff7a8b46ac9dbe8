"""Settings of other libraries and their equivalents here.

The error for an unknown setting names the library and the equivalent. The command line translates options such as
`--total-timesteps 1000` if the value has the same meaning.
"""

from __future__ import annotations

from typing import NamedTuple

SB3, CLEANRL, TIANSHOU, RLLIB, MINDRL = "Stable-Baselines3", "CleanRL", "Tianshou", "RLlib", "MindSpore RL"
LIBRARIES = (SB3, CLEANRL, TIANSHOU, RLLIB, MINDRL)


class LibrarySetting(NamedTuple):
    """A setting of other libraries."""

    libraries: tuple[str, ...]
    equivalents: tuple[str, ...]  # dotted names or options such as --out; the first that an algorithm has applies
    difference: str = ""  # how to convert the value; empty if the value is the same

    def message(self, name: str, equivalent: str | None) -> str:
        """Return for example "`n_steps` (Stable-Baselines3) is `rollout_steps` here"."""
        origin = f"`{name}` ({', '.join(self.libraries)})"
        if equivalent is None:
            return f"{origin} is not a setting here: {self.difference}"
        return f"{origin} is `{equivalent}` here" + (f": {self.difference}" if self.difference else "")


# equivalents here, names by library
SAME_VALUE: list[tuple[str, dict[str, str]]] = [
    # run
    (
        "env_steps",
        {
            SB3: "total_timesteps n_timesteps",
            CLEANRL: "total_timesteps",
            RLLIB: "timesteps_total num_env_steps_sampled_lifetime",
        },
    ),
    ("episodes", {RLLIB: "episodes_total", MINDRL: "episode"}),
    (
        "stop_return",
        {
            SB3: "reward_threshold",
            TIANSHOU: "reward_threshold",
            RLLIB: "stop_reward episode_reward_mean episode_return_mean",
        },
    ),
    ("seed", {MINDRL: "random_seed"}),
    ("distributed.learners", {RLLIB: "num_learners"}),
    ("offline_updates", {MINDRL: "offline_train_steps"}),
    # environment
    (
        "env",
        {
            SB3: "env_id",
            CLEANRL: "env_id gym_id",
            TIANSHOU: "task",
            RLLIB: "environment",
            MINDRL: "env_name",
        },
    ),
    (
        "num_envs",
        {
            SB3: "n_envs",
            TIANSHOU: "training_num num_train_envs num_training_envs",
            MINDRL: "collect_env_num",
        },
    ),
    ("vector.workers", {MINDRL: "num_parallel worker_num"}),
    # collection
    ("replay.n_step rollout_steps", {SB3: "n_steps"}),
    (
        "rollout_steps train_every",
        {
            CLEANRL: "num_steps",
            RLLIB: "rollout_fragment_length",
            MINDRL: "loop_size time_length",
        },
    ),
    ("train_every rollout_steps", {SB3: "train_freq", CLEANRL: "train_frequency"}),
    (
        "learning_starts",
        {
            TIANSHOU: "start_timesteps",
            RLLIB: "num_steps_sampled_before_learning_starts",
            MINDRL: "init_collect_size",
        },
    ),
    (
        "replay.capacity capacity",
        {SB3: "buffer_size", CLEANRL: "buffer_size", TIANSHOU: "buffer_size", MINDRL: "capacity"},
    ),
    (
        "replay.n_step",
        {
            CLEANRL: "n_step",
            TIANSHOU: "n_step estimation_step n_step_return_horizon",
            RLLIB: "n_step",
            MINDRL: "td_step",
        },
    ),
    ("replay.prioritized", {TIANSHOU: "prioritized_replay"}),
    ("replay.alpha", {CLEANRL: "prioritized_replay_alpha", RLLIB: "prioritized_replay_alpha", TIANSHOU: "alpha"}),
    ("replay.beta_start", {CLEANRL: "prioritized_replay_beta", RLLIB: "prioritized_replay_beta", TIANSHOU: "beta"}),
    (
        "epsilon_start",
        {
            SB3: "exploration_initial_eps",
            CLEANRL: "start_e",
            TIANSHOU: "eps_train eps_training",
            MINDRL: "epsi_high",
        },
    ),
    (
        "epsilon_end",
        {
            SB3: "exploration_final_eps",
            CLEANRL: "end_e",
            TIANSHOU: "eps_train_final eps_training_final",
            MINDRL: "epsi_low",
        },
    ),
    ("epsilon_fraction", {SB3: "exploration_fraction", CLEANRL: "exploration_fraction"}),
    ("exploration_noise", {MINDRL: "actor_explore_noise"}),
    ("noise", {TIANSHOU: "noisy_std", RLLIB: "sigma0"}),
    # optimization
    ("updates_per_step", {TIANSHOU: "update_per_step update_step_num_gradient_steps_per_sample"}),
    ("minibatch_size", {SB3: "batch_size", TIANSHOU: "batch_size", RLLIB: "sgd_minibatch_size"}),
    ("batch_size", {MINDRL: "sample_size"}),
    (
        "epochs",
        {
            SB3: "n_epochs",
            CLEANRL: "update_epochs e_policy",
            TIANSHOU: "repeat_per_collect update_step_num_repetitions",
            RLLIB: "num_epochs num_sgd_iter",
            MINDRL: "iter_times iter_time",
        },
    ),
    ("lr", {SB3: "learning_rate", CLEANRL: "learning_rate q_lr", MINDRL: "learning_rate"}),
    ("actor_lr", {CLEANRL: "policy_lr", MINDRL: "alr"}),
    ("critic_lr", {MINDRL: "clr value_lr"}),
    ("optimizer_eps", {SB3: "rms_prop_eps", RLLIB: "adam_epsilon"}),
    ("gamma", {TIANSHOU: "discount_factor", MINDRL: "discount"}),
    ("gae_lambda", {RLLIB: "lambda_"}),
    (
        "clip_range",
        {CLEANRL: "clip_coef", TIANSHOU: "eps_clip", RLLIB: "clip_param", MINDRL: "epsilon clip"},
    ),
    ("value_clip_range", {SB3: "clip_range_vf", RLLIB: "vf_clip_param"}),
    (
        "entropy_coef alpha",
        {
            SB3: "ent_coef",
            CLEANRL: "ent_coef",
            TIANSHOU: "ent_coef",
            RLLIB: "entropy_coeff",
            MINDRL: "entropy_cost",
        },
    ),
    (
        "value_coef",
        {
            SB3: "vf_coef",
            CLEANRL: "vf_coef",
            TIANSHOU: "vf_coef",
            RLLIB: "vf_loss_coeff",
            MINDRL: "critic_coef baseline_cost",
        },
    ),
    ("max_grad_norm", {RLLIB: "grad_clip", MINDRL: "clip_norm"}),
    ("normalize_advantage", {CLEANRL: "norm_adv", TIANSHOU: "norm_adv advantage_normalization"}),
    ("normalize_reward", {SB3: "norm_reward", TIANSHOU: "rew_norm reward_normalization return_scaling"}),
    ("normalize_obs", {SB3: "norm_obs"}),
    ("target_update_interval", {TIANSHOU: "target_update_freq", MINDRL: "update_interval"}),
    ("tau", {MINDRL: "update_factor target_update_factor"}),
    (
        "policy_delay",
        {CLEANRL: "policy_frequency", TIANSHOU: "update_actor_freq", MINDRL: "actor_update_interval"},
    ),
    (
        "target_policy_noise",
        {CLEANRL: "policy_noise", TIANSHOU: "policy_noise", MINDRL: "target_action_noise_stddev"},
    ),
    ("target_noise_clip", {CLEANRL: "noise_clip", TIANSHOU: "noise_clip", MINDRL: "target_action_noise_clip"}),
    ("max_kl", {SB3: "target_kl", TIANSHOU: "max_kl_divergence trust_region_size"}),
    ("cg_iterations", {SB3: "cg_max_steps"}),
    ("damping", {SB3: "cg_damping"}),
    ("line_search_tries", {SB3: "line_search_max_iter", TIANSHOU: "max_backtracks"}),
    ("line_search_shrink", {SB3: "line_search_shrinking_factor", TIANSHOU: "backtrack_coeff"}),
    ("critic_epochs", {SB3: "n_critic_updates", TIANSHOU: "optim_critic_iters"}),
    ("rho_bar", {RLLIB: "vtrace_clip_rho_threshold", MINDRL: "clip_rho_threshold"}),
    ("c_bar", {MINDRL: "clip_cs_threshold"}),
    ("auxiliary_epochs", {CLEANRL: "e_auxiliary"}),
    ("policy_iterations", {CLEANRL: "n_iteration"}),
    ("clone_coef", {CLEANRL: "beta_clone"}),
    ("penalty", {TIANSHOU: "min_q_weight", RLLIB: "min_q_weight"}),
    ("discriminator_lr", {TIANSHOU: "disc_lr"}),
    # network
    ("net.hidden_sizes", {SB3: "net_arch", TIANSHOU: "hidden_sizes", RLLIB: "fcnet_hiddens", MINDRL: "hidden_sizes"}),
    ("net.activation", {RLLIB: "fcnet_activation"}),
    ("net.recurrent_size", {RLLIB: "lstm_cell_size"}),
    ("shared_network", {SB3: "share_features_extractor", RLLIB: "vf_share_layers"}),
    ("critics", {SB3: "n_critics", TIANSHOU: "ensemble_size"}),
    ("target_critics", {TIANSHOU: "subset_size"}),
    ("atoms", {CLEANRL: "n_atoms", TIANSHOU: "num_atoms", RLLIB: "num_atoms", MINDRL: "atoms_num"}),
    ("quantiles", {SB3: "n_quantiles", TIANSHOU: "num_quantiles"}),
    ("dropped_quantiles", {SB3: "top_quantiles_to_drop_per_net"}),
    ("critic_dropout", {SB3: "dropout_rate"}),
    ("renorm_warmup", {SB3: "renorm_warmup_steps"}),
    ("mixer_size", {RLLIB: "mixing_embed_dim", MINDRL: "embed_dim"}),
    ("hyper_size", {MINDRL: "hypernet_embed"}),
    ("memory_size", {MINDRL: "deter_size"}),
    # evaluation, logging
    (
        "eval_episodes",
        {
            SB3: "n_eval_episodes",
            TIANSHOU: "episode_per_test test_step_num_episodes test_num num_test_envs",
            RLLIB: "evaluation_duration",
            MINDRL: "num_evaluate_episode num_eval_episode",
        },
    ),
    ("eval_epsilon", {TIANSHOU: "eps_test eps_inference"}),
    ("eval_video", {CLEANRL: "capture_video"}),
    ("keep_checkpoints", {RLLIB: "num_to_keep", MINDRL: "max_ckpt_num"}),
    ("--init-from", {TIANSHOU: "resume_path"}),
]

_IN_STEPS = "counted in environment steps, or with a unit, such as '10 episodes'"

# equivalents here (none if empty), how to convert the value, names by library
OTHER_VALUE: list[tuple[str, str, dict[str, str]]] = [
    # run
    (
        "env_steps",
        "env_steps = epochs * steps per epoch",
        {TIANSHOU: "max_epoch max_epochs epoch step_per_epoch epoch_num_steps"},
    ),
    (
        "env_steps",
        "env_steps = iterations * rollout_steps * num_envs",
        {CLEANRL: "num_iterations", RLLIB: "training_iteration"},
    ),
    ("device", "cpu or cuda", {CLEANRL: "cuda", RLLIB: "num_gpus num_gpus_per_learner"}),
    ("precision", "fp32, bf16 or fp16", {MINDRL: "compute_type"}),
    (
        "--out",
        "the run folder, which holds logs and checkpoints",
        {
            SB3: "save_path best_model_save_path tb_log_name",
            CLEANRL: "exp_name",
            TIANSHOU: "logdir persistence_base_dir",
            MINDRL: "ckpt_path",
        },
    ),
    # environment
    ("num_envs", "the total number of environments", {RLLIB: "num_envs_per_env_runner num_envs_per_worker"}),
    (
        "vector.workers",
        "the number of processes that share all environments, with vector.backend=process",
        {RLLIB: "num_env_runners num_rollout_workers num_workers"},
    ),
    ("vector.backend", "a name, such as serial or process", {SB3: "vec_env_cls"}),
    ("env", "options are written env.NAME=VALUE", {SB3: "env_kwargs", RLLIB: "env_config"}),
    # collection
    (
        "rollout_steps train_every",
        "counted per environment, not summed over all environments",
        {
            TIANSHOU: "step_per_collect collection_step_num_env_steps",
            RLLIB: "train_batch_size train_batch_size_per_learner",
        },
    ),
    ("exploration_noise", "a number, the standard deviation", {SB3: "action_noise"}),
    ("epsilon_fraction", "a fraction of the budget, not a number of steps", {MINDRL: "decay"}),
    ("replay.her_ratio", "her_ratio = n_sampled_goal / (n_sampled_goal + 1)", {SB3: "n_sampled_goal"}),
    (
        "replay",
        "replay.her=true or replay.prioritized=true",
        {SB3: "replay_buffer_class", RLLIB: "replay_buffer_config"},
    ),
    ("replay.sequence_length rollout_steps", "steps per training sequence", {RLLIB: "max_seq_len"}),
    # optimization
    ("updates_per_step", "updates_per_step = gradient_steps / (train_freq * num_envs)", {SB3: "gradient_steps"}),
    ("updates_per_step", "updates_per_step = training_intensity / batch_size", {RLLIB: "training_intensity"}),
    ("minibatch_size", "minibatch_size = rollout_steps * num_envs / num_minibatches", {CLEANRL: "num_minibatches"}),
    ("lr_schedule", "linear falls to zero over the budget", {CLEANRL: "anneal_lr", TIANSHOU: "lr_decay"}),
    ("entropy_coef_schedule", "a name, such as linear", {RLLIB: "entropy_coeff_schedule"}),
    ("optimizer", "a name, such as adam or rmsprop", {SB3: "optimizer_class use_rms_prop"}),
    ("value_clip_range", "the range as a number, or none", {CLEANRL: "clip_vloss", TIANSHOU: "value_clip"}),
    ("gae_lambda", "1 disables generalized advantage estimation", {RLLIB: "use_gae"}),
    (
        "target_kl",
        "epochs stop early beyond 1.5 times this value; there is no KL penalty",
        {RLLIB: "kl_target kl_coeff"},
    ),
    (
        "target_update_interval",
        "counted in updates, not in environment steps",
        {CLEANRL: "target_network_frequency", RLLIB: "target_network_update_freq"},
    ),
    (
        "alpha",
        "none learns alpha, a number fixes it",
        {CLEANRL: "autotune", TIANSHOU: "auto_alpha", RLLIB: "initial_alpha", MINDRL: "train_alpha_net log_alpha"},
    ),
    (
        "lr",
        "alpha is learned with the same learning rate",
        {TIANSHOU: "alpha_lr", RLLIB: "alpha_lr", MINDRL: "alpha_lr"},
    ),
    ("target_entropy", "the entropy itself, not a factor", {CLEANRL: "target_entropy_scale"}),
    (
        "rho_bar",
        "also clips the importance ratios of the policy gradient",
        {RLLIB: "vtrace_clip_pg_rho_threshold", MINDRL: "clip_pg_rho_threshold"},
    ),
    ("discriminator_updates", "counted per iteration", {TIANSHOU: "disc_update_num"}),
    ("algorithm", "train double_dqn", {TIANSHOU: "is_double", RLLIB: "double_q"}),
    ("algorithm", "train dueling_dqn", {RLLIB: "dueling"}),
    ("algorithm", "train rainbow, whose head is noisy", {RLLIB: "noisy"}),
    # network
    ("log_std_init", "the logarithm of the standard deviation", {MINDRL: "sigma_init_std"}),
    ("net.hidden_sizes", "a list, such as [100, 100]", {MINDRL: "hidden_size hidden_size1 hidden_size2"}),
    ("net.activation", "a name, such as tanh or relu", {SB3: "activation_fn"}),
    ("net", "a group of settings, such as net.hidden_sizes=[64,64]", {SB3: "policy_kwargs", RLLIB: "model"}),
    (
        "net.kind",
        "auto, simba, or a class of your own as your.module:Net",
        {SB3: "features_extractor_class", RLLIB: "custom_model"},
    ),
    ("net.kind", "auto chooses by the observation's shape", {SB3: "policy"}),
    ("net.cnn", "a name, such as nature", {RLLIB: "conv_filters"}),
    ("net.recurrent", "none, gru or lstm", {RLLIB: "use_lstm"}),
    ("critics", "2 for twin critics", {RLLIB: "twin_q"}),
    # evaluation, logging
    (
        "eval_every",
        _IN_STEPS,
        {SB3: "eval_freq", RLLIB: "evaluation_interval", MINDRL: "eval_per_episode eval_interval"},
    ),
    ("eval_stochastic", "with the opposite value", {SB3: "deterministic", TIANSHOU: "deterministic_eval"}),
    (
        "checkpoint_every",
        _IN_STEPS,
        {
            SB3: "save_freq",
            TIANSHOU: "save_interval",
            RLLIB: "checkpoint_frequency",
            MINDRL: "save_per_episode num_save_episode",
        },
    ),
    ("log_every", _IN_STEPS, {SB3: "log_interval", TIANSHOU: "log_interval"}),
    ("normalize_obs", "true or false", {SB3: "normalize", RLLIB: "observation_filter"}),
    ("tensorboard", "true or false; the event files are in the run folder", {SB3: "tensorboard_log"}),
    (
        "wandb",
        "the project, as PROJECT or ENTITY/PROJECT",
        {CLEANRL: "track wandb_project_name wandb_entity", TIANSHOU: "wandb_project logger_type"},
    ),
    # no equivalent
    ("", "spaces and agents are read from the environment", {MINDRL: "state_space_dim action_space_dim num_agent"}),
    ("", "runs with the same seed are always identical on the CPU", {CLEANRL: "torch_deterministic"}),
    ("", "the final and the best weights are always saved in the run folder", {CLEANRL: "save_model"}),
    ("", "stack observations with the option env.stack=NUMBER", {SB3: "frame_stack", TIANSHOU: "frames_stack"}),
    ("", "progress is always printed", {SB3: "verbose progress_bar"}),
    ("", "share an agent with `zhixing push RUN USER/NAME`", {CLEANRL: "upload_model hf_entity"}),
    ("", "watch a trained agent with `zhixing watch RUN`", {TIANSHOU: "render watch"}),
    ("", "continue a run with `zhixing resume RUN`", {TIANSHOU: "resume resume_id"}),
    ("", "state-dependent exploration is not implemented", {SB3: "use_sde sde_sample_freq"}),
    ("", "the replay buffer never stores next observations twice", {SB3: "optimize_memory_usage"}),
    ("", "hindsight goals are reached later in the same episode (future)", {SB3: "goal_selection_strategy"}),
    ("", "dual-clip PPO is not implemented", {TIANSHOU: "dual_clip"}),
    ("", "advantages are computed once per rollout", {TIANSHOU: "recompute_adv"}),
    ("", "all networks are PyTorch modules", {RLLIB: "framework"}),
    ("", "scale rewards in the environment", {MINDRL: "reward_scale_factor"}),
]


def _by_name() -> dict[str, LibrarySetting]:
    settings: dict[str, LibrarySetting] = {}
    for equivalents, difference, names in [*((here, "", names) for here, names in SAME_VALUE), *OTHER_VALUE]:
        for library, names_of_library in names.items():
            for name in names_of_library.split():
                libraries = settings[name].libraries if name in settings else ()
                settings[name] = LibrarySetting((*libraries, library), tuple(equivalents.split()), difference)
    return settings


LIBRARY_SETTINGS = _by_name()
