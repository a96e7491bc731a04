# AutoKernel in a container: a compiler, git, PyTorch and a clone.
#
#   docker build -t autokernel .                                             PyTorch for CPUs
#   docker build -t autokernel-cuda --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg TORCH=cu130 .
#   docker run --rm -it --security-opt seccomp=unconfined -v autokernel:/autokernel/workspace autokernel
#   docker run --rm -it --gpus all --security-opt seccomp=unconfined autokernel-cuda
#
# The gate's sandbox makes namespaces of its own, which Docker's default seccomp profile refuses: with that profile it says
# which layers are missing, and goes on without them (--require-sandbox: it does not).
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
ARG TORCH=cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git python3 python3-venv python3-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /autokernel
COPY . .
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir uv \
    && VIRTUAL_ENV=.venv .venv/bin/uv pip install --no-cache --torch-backend="${TORCH}" -e . \
    && git config --global --add safe.directory /autokernel
ENV PATH=/autokernel/.venv/bin:$PATH
CMD ["python", "orchestrate.py"]
