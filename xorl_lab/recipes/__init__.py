"""Training loops to read, copy and change.

Each recipe is one function that yields a :class:`~xorl_lab.types.StepRecord` per step; nothing is
hidden in a trainer class.

* :mod:`~xorl_lab.recipes.grpo`: reinforcement learning with group-relative advantages.
* :mod:`~xorl_lab.recipes.sft`: supervised fine-tuning on token lists or conversations.
* :mod:`~xorl_lab.recipes.environments`: rewards of several turns, with tools.
* :mod:`~xorl_lab.recipes.tasks`: small tasks with verifiable rewards.
* :mod:`~xorl_lab.recipes.gym`: questions of the package reasoning-gym.
* :mod:`~xorl_lab.recipes.report`: one HTML file about a finished run.
* :mod:`~xorl_lab.recipes.demo`: the whole way, from base model to report.

What they share: :mod:`~xorl_lab.recipes.prompts`, :mod:`~xorl_lab.recipes.rewards`,
:mod:`~xorl_lab.recipes.rollouts`, :mod:`~xorl_lab.recipes.episodes` and
:mod:`~xorl_lab.recipes.settings`.
"""
