# Trains an agent on level 1-1 of Super Mario Bros. and records a video:
#   docker build -t zhixing-mario .
#   docker run --rm -v "$PWD/runs:/zhixing/runs" zhixing-mario
# The run is in runs/mario. Repeating the command resumes an interrupted run. To run another command:
#   docker run --rm -v "$PWD/runs:/zhixing/runs" zhixing-mario zhixing train ppo --env mario/1-2 --out runs/1-2
# This image has not been built yet.
FROM python:3.11-slim-bookworm
WORKDIR /zhixing

RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu

# nes-py is compiled during installation; the compiler is removed afterwards
COPY pyproject.toml README.md LICENSE ./
COPY zhixing zhixing
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && pip install --no-cache-dir '.[mario]' \
    && apt-get purge -y --auto-remove g++ \
    && rm -rf /var/lib/apt/lists/*
COPY zoo zoo

CMD ["sh", "-c", "if [ -f runs/mario/config.yaml ]; then zhixing resume runs/mario; \
     else zhixing train ppo --env mario/1-1 env.noops=30 --out runs/mario; fi \
     && zhixing video runs/mario -o runs/mario/agent.mp4"]
