# The server in a container, from the wheel of `make dist`; no compiler is needed (docs/platforms.md).
FROM debian:bookworm-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/specgen \
    && useradd --uid 1000 --no-create-home --home-dir /models specgen \
    && install --directory --owner specgen /models

COPY dist/*.whl /tmp/
RUN /opt/specgen/bin/pip install --no-cache-dir "$(echo /tmp/*_"$(uname -m)".whl)[server]" && rm /tmp/*.whl

# Models, what was measured, and the user's own configuration.
ENV PATH=/opt/specgen/bin:$PATH SPECGEN_CACHE=/models SPECGEN_CONFIG=/models/config SPECGEN_DATA=/models/data \
    HF_HOME=/models/huggingface
VOLUME /models
USER specgen
EXPOSE 8080
HEALTHCHECK --start-period=10m CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health')"]

# It refuses to start without --api-key-file or --insecure-network: other machines can reach it.
ENTRYPOINT ["specgen", "serve", "--host", "0.0.0.0"]
