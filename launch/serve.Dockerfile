# The service in a container. Build it in a clone; the bundle and the index are mounted, not copied:
#
#     docker build -f launch/serve.Dockerfile -t dmljax-serve .
#     docker run --rm -p 127.0.0.1:8000:8000 -v $PWD/photos.bundle:/data/photos.bundle:ro \
#         -v $PWD/photos.index:/data/photos.index -v $PWD/token.txt:/run/token.txt:ro dmljax-serve
#
# For other machines put nginx in front: launch/serve.nginx.conf, as launch/serve.yaml does.
#
# While another process adds items, user 10001 must be able to write to the folder of the index, also
# to search: SQLite keeps its write-ahead log there. For GPUs build with
# --build-arg EXTRAS=serve,postgres,cuda12.
FROM python:3.12-slim

ARG EXTRAS=serve,postgres
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# GKE mounts the driver of its GPUs (libcuda.so.1, nvidia-smi) into these folders, where nothing else
# of this image looks: https://cloud.google.com/kubernetes-engine/docs/how-to/gpus#cuda, and
# cmd/nvidia_gpu/README.md of github.com/GoogleCloudPlatform/container-engine-accelerators. Where
# there is no such folder, this has no effect.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 PATH=/usr/local/nvidia/bin:$PATH

RUN useradd --uid 10001 --create-home dmljax
COPY setup.cfg pyproject.toml README.md LICENSE /src/
COPY dmljax /src/dmljax
RUN pip install "/src[${EXTRAS}]" && rm -rf /src

USER 10001
WORKDIR /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]

# No shell, because SIGTERM must reach the service itself.
ENTRYPOINT ["dmljax", "serve"]
CMD ["/data/photos.bundle", "--index=/data/photos.index", "--host=0.0.0.0", "--port=8000", "--token-file=/run/token.txt"]
