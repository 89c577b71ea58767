"""The PyTorch engine: noise that follows the gradients, at the price of a plain step."""

try:
    from torch.nn.parallel import (
        DistributedDataParallel as DifferentiallyPrivateDistributedDataParallel,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Expected PyTorch for privagrad.torch, found none: pip install 'privagrad[torch]'."
    ) from error

from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.damping import damp_steps, start_from_counts, word_shares
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.guards.constants import public
from privagrad.torch.loaders import BatchMemoryManager
from privagrad.torch.module import PrivateModule
from privagrad.torch.moments import second_moments
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.per_example.linear_cross_entropy import LinearCrossEntropy
from privagrad.torch.per_example_loss import PerExampleLoss
from privagrad.torch.schedules import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from privagrad.torch.validator import ModuleValidator, UnsupportedModuleError

__all__ = [
    "AdaptiveSGD",
    "BatchMemoryManager",
    "DifferentiallyPrivateDistributedDataParallel",
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "LinearCrossEntropy",
    "ModuleValidator",
    "PerExampleLoss",
    "PrivacyEngine",
    "PrivateModule",
    "PrivateOptimizer",
    "StepGradClip",
    "StepNoise",
    "UnsupportedModuleError",
    "damp_steps",
    "public",
    "second_moments",
    "start_from_counts",
    "word_shares",
]
