# An image with this project and everything that it uses on a GPU, from requirements/gpu.lock.txt (docs/how-to/gpu.md):
#
#   docker build -t hybridengine .
#   docker run --rm --gpus all --ipc host hybridengine make gpu-test
#
# Arguments (--build-arg NAME=VALUE):
#   CUDA_ARCHITECTURES   what flash-attn, Transformer Engine and apex are compiled for: 90 for H100 and H200, 80 for A100
#   MAX_JOBS             compilers at a time; each needs up to 8 GB of memory
#   APEX=1               also build NVIDIA apex, of the tag APEX_TAG

# The toolkit has the CUDA version of the lock's torch; cuDNN's headers are those that Transformer Engine is built with.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

SHELL ["/bin/bash", "-eu", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hybridengine
ENV PATH=/opt/hybridengine/.venv-gpu/bin:${PATH}

ARG MAX_JOBS=8
ARG CUDA_ARCHITECTURES=90
# Only what the installation of the lock reads, so that other changes leave this layer, the slowest, as it is.
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
