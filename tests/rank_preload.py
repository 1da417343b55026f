"""What every rank imports: loaded once in the process that ranks are forked from, see `support.rank_context`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not survive the fork

import megatron.core.optimizer  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401

import megappo.trainer.ppo
import megappo.trainer.reward_model
import megappo.trainer.sft  # noqa: F401
