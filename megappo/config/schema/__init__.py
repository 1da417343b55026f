"""The configuration schema: one file a section, every key with its default and one line of meaning."""

from megappo.config.schema.actor import ActorConfig, KlLossType, KlType
from megappo.config.schema.algorithm import (
    AdvEstimator,
    AlgorithmConfig,
    CorrectionConfig,
    KlCtrlConfig,
    OverlongConfig,
    RewardShapingConfig,
)
from megappo.config.schema.base import Dtype, LossAggMode, Section
from megappo.config.schema.critic import CriticConfig
from megappo.config.schema.data import DataConfig
from megappo.config.schema.experiment import GROUP_ESTIMATORS, INHERITS, ExperimentConfig
from megappo.config.schema.guard import GuardActionConfig, GuardConfig, GuardRuleConfig, KlBandConfig
from megappo.config.schema.model import ModelConfig
from megappo.config.schema.offline import OfflineConfig
from megappo.config.schema.optim import CriticOptimConfig, OptimConfig, SftOptimConfig
from megappo.config.schema.parallel import ParallelConfig
from megappo.config.schema.reference import ReferenceConfig
from megappo.config.schema.reward_model import RewardModelConfig
from megappo.config.schema.rewards import RewardConfig
from megappo.config.schema.rollout import RolloutConfig, ValRolloutConfig
from megappo.config.schema.schedules import ADJUSTABLE, SCHEDULABLE, ScheduleConfig
from megappo.config.schema.sft import SftConfig
from megappo.config.schema.trainer import TrainerConfig

__all__ = [
    "ADJUSTABLE",
    "GROUP_ESTIMATORS",
    "INHERITS",
    "SCHEDULABLE",
    "ActorConfig",
    "AdvEstimator",
    "AlgorithmConfig",
    "CorrectionConfig",
    "CriticConfig",
    "CriticOptimConfig",
    "DataConfig",
    "Dtype",
    "ExperimentConfig",
    "GuardActionConfig",
    "GuardConfig",
    "GuardRuleConfig",
    "KlBandConfig",
    "KlCtrlConfig",
    "KlLossType",
    "KlType",
    "LossAggMode",
    "ModelConfig",
    "OfflineConfig",
    "OptimConfig",
    "OverlongConfig",
    "ParallelConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardShapingConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "Section",
    "SftConfig",
    "SftOptimConfig",
    "TrainerConfig",
    "ValRolloutConfig",
]
