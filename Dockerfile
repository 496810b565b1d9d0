# Images with this project and everything that it uses, from the locks in requirements/, by the commands of the Makefile:
#
#   docker build -t hybridengine .                        for GPUs (docs/how-to/gpu.md)
#   docker run --rm --gpus all --ipc host hybridengine make gpu-test
#
#   docker build -t hybridengine-cpu --target cpu .       for the demo and for CI, on CPUs (docs/how-to/install.md)
#   docker run --rm --shm-size 4g hybridengine-cpu
#   docker run --rm --shm-size 4g --privileged hybridengine-cpu .ci/run
#
# Arguments (--build-arg NAME=VALUE):
#   PIP_EXTRA_INDEX_URL  a further package index: for `cpu`, PyTorch's with CPU wheels, if pip's own has no torch==...+cpu
#   CUDA_ARCHITECTURES   what flash-attn, Transformer Engine and apex are compiled for: 90 for H100 and H200, 80 for A100
#   MAX_JOBS             compilers at a time; each needs up to 8 GB of memory
#   APEX=1               also build NVIDIA apex, of the tag APEX_TAG

ARG CPU_IMAGE=debian:12-slim
# The toolkit has the CUDA version of the lock's torch; cuDNN's headers are those that Transformer Engine is built with.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# ---- CPUs ---------------------------------------------------------------------------------------------------------

FROM ${CPU_IMAGE} AS cpu

SHELL ["/bin/bash", "-eu", "-o", "pipefail", "-c"]

# The second line is for tests alone: hosts in namespaces. Chromium, SLURM and OpenSSH are installed by `make test`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ libnuma1 make python3.11 python3.11-dev python3.11-venv wget \
        iproute2 procps \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hybridengine
ENV PATH=/opt/hybridengine/.venv/bin:${PATH}

ARG PIP_EXTRA_INDEX_URL
# Only what the installation of the lock reads, so that other changes leave this layer, the slowest, as it is.
COPY Makefile pyproject.toml ./
COPY requirements/cpu.lock.txt requirements/
RUN PIP_NO_CACHE_DIR=1 make install-lock

COPY . .
RUN make install

CMD ["hybridengine", "demo"]

# ---- GPUs, the image that is built without --target ---------------------------------------------------------------

FROM ${CUDA_IMAGE} AS gpu

SHELL ["/bin/bash", "-eu", "-o", "pipefail", "-c"]

# NCCL uses InfiniBand and RoCE through ibverbs. KubeRay before 1.6 calls wget in pods.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make python3.12 python3.12-dev python3.12-venv \
        ibverbs-providers libibverbs1 wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hybridengine
ENV PATH=/opt/hybridengine/.venv-gpu/bin:${PATH}

ARG PIP_EXTRA_INDEX_URL
ARG MAX_JOBS=8
ARG CUDA_ARCHITECTURES=90
COPY Makefile pyproject.toml ./
COPY requirements/gpu.lock.txt requirements/
RUN export PIP_NO_CACHE_DIR=1 MAX_JOBS="${MAX_JOBS}" \
        FLASH_ATTN_CUDA_ARCHS="${CUDA_ARCHITECTURES}" NVTE_CUDA_ARCHS="${CUDA_ARCHITECTURES}" \
    && make install-lock GPU=1

# Optional, and not from a registry, where `apex` is another project.
ARG APEX=0
ARG APEX_TAG=25.09
RUN if [ "${APEX}" = 1 ]; then \
        git clone --depth 1 --branch "${APEX_TAG}" https://github.com/NVIDIA/apex.git /tmp/apex \
        && TORCH_CUDA_ARCH_LIST="$(printf '%s' "${CUDA_ARCHITECTURES}" | sed -E 's/([0-9]+)([0-9])/\1.\2/g')" \
            APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="${MAX_JOBS}" \
            python -m pip install --no-cache-dir --no-deps --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

COPY . .
RUN make install GPU=1

CMD ["hybridengine", "--help"]
