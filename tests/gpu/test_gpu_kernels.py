"""The Triton kernels on the GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
from kernel_cases import *  # noqa: F403

pytestmark = pytest.mark.gpu
