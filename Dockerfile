# Two images. To train, on NVIDIA's PyTorch with transformer-engine, flash-attn and apex as shipped there:
#     docker build -t megatron-wlb .
# For `megatron-wlb analyze` and the other commands that need neither torch nor a GPU:
#     docker build -t megatron-wlb-analyze --target analyze .
# NVIDIA's image for megatron-core 0.19 (upstream's docker/.ngc_version.dev). An image that has a Megatron keeps it.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:43c018d6a12963f1a1bad85ef8574b5c2a978eec2be0ebcacfb87f69e0d210e1
ARG PYTHON=3.12-slim-bookworm@sha256:34386ef0cb081344d7ec1c103ba398e6e9f64e9ab3a1509accc92a4e24a07258

FROM python:${PYTHON} AS analyze-wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE megatron_wlb_hook.py megatron_wlb_hook.pth ./
COPY csrc csrc
COPY megatron_wlb megatron_wlb
COPY megatron_rehearsal megatron_rehearsal
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON} AS analyze
COPY requirements/analysis.txt /etc/megatron_wlb/analysis.txt
RUN --mount=type=bind,from=analyze-wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --require-hashes --requirement /etc/megatron_wlb/analysis.txt \
    && pip install --no-cache-dir --no-deps /wheels/*.whl \
    && useradd --create-home --uid 10001 wlb
COPY scripts/docker/healthcheck.py /etc/megatron_wlb/
USER 10001
WORKDIR /home/wlb
HEALTHCHECK --interval=5m --timeout=1m CMD ["python", "/etc/megatron_wlb/healthcheck.py"]
ENTRYPOINT ["megatron-wlb"]
CMD ["--help"]

FROM ${BASE} AS train-wheel
# The image pins every package that it has for pip; upstream's Dockerfile lifts that, too.
ENV PIP_CONSTRAINT=""
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE megatron_wlb_hook.py megatron_wlb_hook.pth ./
COPY csrc csrc
COPY megatron_wlb megatron_wlb
COPY megatron_rehearsal megatron_rehearsal
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . msgspec==0.22.0

FROM ${BASE} AS train
# Packages of a home that is mounted would come before the image's own.
ENV PIP_CONSTRAINT="" CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONNOUSERSITE=1
# Torch and all that is built against it stay the image's own.
COPY requirements/train.txt /etc/megatron_wlb/train.txt
RUN --mount=type=bind,from=train-wheel,source=/wheels,target=/wheels \
    { python -c 'import importlib.util as u; raise SystemExit(u.find_spec("megatron") is None)' \
    || pip install --no-cache-dir --require-hashes --requirement /etc/megatron_wlb/train.txt; } \
    && pip install --no-cache-dir --no-deps /wheels/*.whl \
    && useradd --create-home --uid 10001 wlb
COPY scripts/docker/healthcheck.py /etc/megatron_wlb/
COPY pretrain_gpt.py /opt/megatron_wlb/
COPY scripts/slurm /opt/megatron_wlb/scripts/slurm
USER 10001
WORKDIR /home/wlb
HEALTHCHECK --interval=5m --timeout=2m CMD ["python", "/etc/megatron_wlb/healthcheck.py", "--train"]
