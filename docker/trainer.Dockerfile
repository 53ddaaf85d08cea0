# Training, evaluation and index builds: Keras on TensorFlow for CPUs, and FAISS. Build from the repository's root:
#   docker build -f docker/trainer.Dockerfile -t longtail-trainer .
# and run it as yourself on a directory of yours:
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" longtail-trainer longtail-train fit recipe.toml --out runs/1
FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY docker/requirements-build.txt docker/requirements-trainer.txt docker/
RUN python -m venv --without-pip /opt/longtail \
    && python -m pip --python /opt/longtail/bin/python install --require-hashes --only-binary :all: -r docker/requirements-trainer.txt \
    && python -m pip install --require-hashes --only-binary :all: -r docker/requirements-build.txt
COPY LICENSE README.md pyproject.toml setup.py ./
COPY bundle bundle
COPY commands commands
COPY index index
COPY longtail longtail
COPY state state
COPY tables tables
COPY trainer trainer
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m pip --python /opt/longtail/bin/python install --no-deps --no-index /wheels/*.whl

FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
LABEL org.opencontainers.image.title="longtail-trainer" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /work --shell /usr/sbin/nologin longtail \
    && install --directory --owner=longtail --group=longtail --mode=0755 /work
COPY --from=build /opt/longtail /opt/longtail
# Keras and matplotlib keep a file or two at home; /tmp is writable for whatever user the container is run as.
ENV PATH=/opt/longtail/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=1
USER 10001:10001
WORKDIR /work
STOPSIGNAL SIGTERM
CMD ["longtail-train", "--help"]
