# The server with the shipped models.
#   docker build -t beamline .                          for CPUs
#   docker build -t beamline:gpu --build-arg DEVICE=gpu .
#   docker run --rm --read-only -p 8000:8000 -p 8001:8001 -p 8002:8002 beamline
# Other models: docker run ... -v "$PWD/my_models:/models:ro" beamline

# cpu or gpu: the extra of pyproject.toml that brings the runtime; gpu brings CUDA's libraries, too: no CUDA base image.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS build
ARG DEVICE
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/beamline
ENV PATH=/opt/beamline/bin:$PATH

# The dependencies are a layer of their own: a change of the source does not fetch them again.
COPY pyproject.toml constraints.txt ./
RUN DEVICE=$DEVICE python -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras[os.environ['DEVICE']], *extras['tracing'], sep='\n')" >requirements.txt \
    && pip install -c constraints.txt setuptools -r requirements.txt

COPY . .
RUN pip install --no-deps --no-build-isolation . \
    && pip check \
    && pip uninstall --yes setuptools pip


FROM python:3.11-slim-bookworm
ARG DEVICE
LABEL org.opencontainers.image.title="beamline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      io.beamline.device="$DEVICE"
RUN useradd --system --uid 10001 --create-home beamline
COPY --from=build /opt/beamline /opt/beamline
COPY model_repo /models
# Nothing is ever written: the root file system may be read-only.
ENV PATH=/opt/beamline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 ORT_DISABLE_TELEMETRY=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/beamline
EXPOSE 8000 8001 8002
# Health checks fail for 5 seconds first, then calls are drained: give it 30 seconds and more (docker stop --time 40).
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8002/healthz', timeout=2)"]
ENTRYPOINT ["beamline", "serve", "--host", "0.0.0.0"]
CMD ["--repo", "/models"]
