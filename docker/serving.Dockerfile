# The service on a CPU: no TensorFlow, no Keras, no pip. Build from the repository's root:
#   docker build -f docker/serving.Dockerfile -t longtail-serving .
FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY docker/requirements-build.txt docker/requirements-serving.txt docker/
RUN python -m venv --without-pip /opt/longtail \
    && python -m pip --python /opt/longtail/bin/python install --require-hashes --only-binary :all: -r docker/requirements-serving.txt \
    && python -m pip install --require-hashes --only-binary :all: -r docker/requirements-build.txt
COPY LICENSE README.md pyproject.toml setup.py ./
COPY bundle bundle
COPY commands commands
COPY index index
COPY longtail longtail
COPY serving serving
COPY state state
COPY tables tables
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m pip --python /opt/longtail/bin/python install --no-deps --no-index /wheels/*.whl

FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
LABEL org.opencontainers.image.title="longtail-serving" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /state --shell /usr/sbin/nologin longtail \
    && install --directory --owner=longtail --group=longtail --mode=0700 /state \
    && install --directory --mode=0755 /releases
COPY --from=build /opt/longtail /opt/longtail
ENV PATH=/opt/longtail/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /state
VOLUME /state
EXPOSE 8000
STOPSIGNAL SIGTERM
# /livez, for engines that restart what is unhealthy; compose.yaml asks /readyz.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ.get('LONGTAIL_PORT', 8000)}/livez\", timeout=2)"]
ENTRYPOINT ["longtail-serve"]
CMD ["run", "/releases", "--host", "0.0.0.0", "--state", "/state"]
