# syntax=docker/dockerfile:1
# MegaPPO in a container. Two targets:
#   docker build --target cpu -t megappo:cpu .      # to try it: no GPU, small image
#   docker build --target gpu -t megappo:gpu .      # NVIDIA's PyTorch image: torch, Transformer Engine, apex, NCCL
#   docker build --target sglang -t megappo:sglang .  # the same with SGLang in an environment of its own
# Run: docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/workspace" megappo:gpu train exp.yaml --nproc 8
# None of these images has been built yet: docs/launch.md lists what is unverified.

# ---------------------------------------------------------------- CPU
FROM python:3.11.13-slim-bookworm AS cpu

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# torch's CPU build first, or a CUDA build comes along as a dependency.
RUN pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
WORKDIR /opt/megappo
COPY . .
RUN pip install . && useradd --create-home --uid 1000 megappo && mkdir /workspace && chown megappo /workspace
USER 1000
WORKDIR /workspace
ENTRYPOINT ["megappo"]
CMD ["--help"]

# ---------------------------------------------------------------- GPU
# 25.12: Python 3.12, torch 2.10.0a0, CUDA 13.1, NCCL, and Transformer Engine built against them.
FROM nvcr.io/nvidia/pytorch:25.12-py3 AS gpu

ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG MAX_JOBS=8
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# megatron-core wants one queue per device when communication overlaps computation (before Blackwell).
ENV CUDA_DEVICE_MAX_CONNECTIONS=1

# apex comes with the image; where a later one leaves it out it is built from its repository (the `apex` on the package
# index is something else). Optional: Transformer Engine brings the same fused optimizer.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN if ! python -c "import apex"; then \
        git clone https://github.com/NVIDIA/apex /tmp/apex \
        && git -C /tmp/apex checkout "$APEX_COMMIT" \
        && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS="$MAX_JOBS" \
           pip install --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

# The image pins what it was built with in PIP_CONSTRAINT; torch and Transformer Engine must stay as they are.
WORKDIR /opt/megappo
COPY . .
# hadolint ignore=DL3013
RUN pip list --format=freeze | grep -i -E '^(torch|triton|transformer[-_]engine)' >/tmp/before \
    && pip install '.[wandb,mlflow,math,reasoning,remote,report]' \
    && pip list --format=freeze | grep -i -E '^(torch|triton|transformer[-_]engine)' | diff /tmp/before - \
    && rm /tmp/before
# megatron-core 0.16.1 names Transformer Engine 2.9 to 2.11.
RUN python -c "from importlib.metadata import version; from packaging.version import Version as V; \
    assert V('2.9.0a0') <= V(version('transformer-engine')) < V('2.12'), version('transformer-engine')"
# uid 1000 may be taken by the base image's own user.
RUN useradd --create-home --non-unique --uid 1000 megappo && mkdir -p /workspace && chown megappo /workspace
USER 1000
WORKDIR /workspace
ENTRYPOINT ["megappo"]
CMD ["--help"]

# ---------------------------------------------------------------- GPU with SGLang
# SGLang pins a torch of its own, which would replace the one that Transformer Engine was built for: it gets its own
# environment. Servers are started with /opt/sglang/bin/python -m sglang.launch_server.
FROM gpu AS sglang

USER root
RUN python -m venv /opt/sglang && PIP_CONSTRAINT='' /opt/sglang/bin/pip install sglang==0.5.23
USER 1000
