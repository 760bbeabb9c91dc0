# Training in a container, for launch/gke.yaml. Build it in a clone:
#
#     docker build -f launch/train.Dockerfile -t REGION-docker.pkg.dev/PROJECT/REPOSITORY/dmljax:latest .
#
# This is the image for TPUs. For GPUs build with --build-arg EXTRAS=cuda12,fast,parquet. Data,
# weights and run folders are on a volume: nothing of them is copied into the image.
FROM python:3.12-slim

ARG EXTRAS=tpu,fast,parquet
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# GKE mounts the driver of its GPUs (libcuda.so.1, nvidia-smi) into these folders, where nothing else
# of this image looks: https://cloud.google.com/kubernetes-engine/docs/how-to/gpus#cuda, and
# cmd/nvidia_gpu/README.md of github.com/GoogleCloudPlatform/container-engine-accelerators. Where
# there is no such folder, this has no effect.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 PATH=/usr/local/nvidia/bin:$PATH

RUN useradd --uid 10001 --create-home dmljax
WORKDIR /dmljax
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY dmljax dmljax
RUN pip install ".[${EXTRAS}]"
COPY configs configs
COPY studies studies

USER 10001
STOPSIGNAL SIGTERM

# No shell, because SIGTERM must reach the run itself.
ENTRYPOINT ["python", "-m", "dmljax.main"]
CMD ["--help"]
