import pytest
import torch


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request) -> str:
    """Where the ranks of `warm_ranks` compute: the GPU if there is one. The CPU runs the same code elsewhere."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a CUDA device" if request.param == "cuda" else "this machine computes on its GPU")
    return request.param
