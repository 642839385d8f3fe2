# groupwise on NVIDIA GPUs:   docker build -f docker/cuda.Dockerfile -t groupwise:cuda .
#     docker run --rm --gpus all --shm-size=8g -v "$PWD/runs:/app/runs" groupwise:cuda doctor
# PyTorch's wheels bring CUDA's libraries; of the host only the driver is used. gcc is for Triton,
# which compiles a launcher for each kernel.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        bubblewrap=0.8.* gcc=4:12.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 groupwise \
    && mkdir -p /app/runs \
    && chown -R groupwise /app
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
# PyTorch's CUDA build says itself which Triton it takes.
RUN sed -i '/^triton==/d' constraints.txt \
    && pip install --no-cache-dir -c constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cu130 torch
COPY groupwise groupwise
RUN pip install --no-cache-dir -c constraints.txt '.[view,math,hub]'
COPY configs /app/configs
USER 1000:1000
WORKDIR /app
ENTRYPOINT ["groupwise"]
CMD ["doctor"]
