# The CPU server with the shipped models. Build: docker build -t beamline .
#   docker run --rm -p 8001:8001 -p 8002:8002 beamline
# Other models: docker run ... -v "$PWD/my_models:/models:ro" beamline

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/beamline
ENV PATH=/opt/beamline/bin:$PATH

# The dependencies are a layer of their own: a change of the source does not fetch them again.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['cpu'], sep='\n')" >requirements.txt \
    && pip install -c constraints.txt setuptools -r requirements.txt

COPY . .
RUN pip install --no-deps --no-build-isolation . \
    && pip check \
    && pip uninstall --yes setuptools pip


FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --create-home beamline
COPY --from=build /opt/beamline /opt/beamline
COPY model_repo /models
ENV PATH=/opt/beamline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER beamline
WORKDIR /home/beamline
EXPOSE 8001 8002
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8002/healthz', timeout=2)"]
ENTRYPOINT ["beamline", "serve", "--host", "0.0.0.0"]
CMD ["--repo", "/models"]
