# groupwise on CPUs:   docker build -f docker/cpu.Dockerfile -t groupwise .
#                      docker run --rm -v "$PWD/runs:/app/runs" groupwise train steps=50
FROM python:3.12-slim-bookworm AS build

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY groupwise groupwise
RUN python -m venv /opt/groupwise \
    && /opt/groupwise/bin/pip install --no-cache-dir -c constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu torch \
    && /opt/groupwise/bin/pip install --no-cache-dir -c constraints.txt '.[view,math,hub]'

FROM python:3.12-slim-bookworm

# Isolates programs that a model writes, for the reward `code`.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap=0.8.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 groupwise \
    && mkdir -p /app/runs \
    && chown -R groupwise /app
COPY --from=build /opt/groupwise /opt/groupwise
COPY configs /app/configs
ENV PATH=/opt/groupwise/bin:$PATH
USER 1000:1000
WORKDIR /app
ENTRYPOINT ["groupwise"]
CMD ["doctor"]
