# For machines with NVIDIA GPUs and a driver for CUDA 13:
#   docker build -t sparsellm .
#   docker run --gpus all --ipc host -v /data:/data -v $PWD/runs:/runs sparsellm \
#     train small --set data.corpus=local --set 'data.files=[/data/*.parquet]' \
#     --set validation.every_steps=0 --set logging.run_dir=/runs
# Several GPUs: docker run --entrypoint accelerate … sparsellm launch --config_file launch/ddp8.yaml
# -m sparsellm train …
# CuPy compiles the kernels at run time. The CUDA headers and NVRTC that it needs come with its packages.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/sparsellm PATH=/opt/sparsellm/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV
WORKDIR /src
COPY . .
# torch first: constraints.txt pins its version, and the package index decides the CUDA version.
RUN pip install --constraint constraints.txt torch \
    && pip install --constraint constraints.txt '.[cuda,eval]'
# On a volume, compiled kernels and compiled blocks outlive the container.
ENV CUPY_CACHE_DIR=/cache/cupy TORCHINDUCTOR_CACHE_DIR=/cache/inductor
VOLUME /cache
ENTRYPOINT ["sparsellm"]
