"""MegaPPO: PPO alignment of large language models on Megatron-core, correct at every parallel layout."""

__version__ = "0.1.0"
