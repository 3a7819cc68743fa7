#!/usr/bin/env bash
# Build fedel-server and fedel-agent from $BASE_IMAGE. Without it: from the public Python image; if that cannot be
# pulled, from an image of Debian packages, with wheels that the pip of this machine downloads.
set -euo pipefail
cd "$(dirname "$0")/.."

PUBLIC=python:3.11-slim-bookworm
LOCAL=fedel-local/base:bookworm
PIP=${PIP:-.venv/bin/pip}
TAG=${TAG:-$(sed -n 's/^__version__ = "\(.*\)"/\1/p' fedel/__init__.py)}

docker info >/dev/null 2>&1 || {
  echo "no Docker Engine answers: start one, or run \`docker/local/engine.sh up\` and export what it prints" >&2
  exit 1
}
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0

has() { docker image inspect "$1" >/dev/null 2>&1; }

ARGUMENTS=()
if [ -z "${BASE_IMAGE:-}" ]; then
  if has "$PUBLIC" || docker pull --quiet "$PUBLIC" 2>/dev/null; then
    BASE_IMAGE=$PUBLIC
  else
    echo "$PUBLIC cannot be pulled: making a base from Debian's packages"
    has "$LOCAL" || docker/local/base.sh base
    BASE_IMAGE=$LOCAL
    for kind in build server agent; do
      "$PIP" download --quiet --require-hashes --only-binary :all: --dest docker/wheels -r "docker/requirements/$kind.txt"
    done
    ARGUMENTS+=(--build-arg PIP_NO_INDEX=1)
  fi
fi

for kind in server agent; do
  docker build --file "docker/Dockerfile.$kind" --tag "fedel-$kind:$TAG" --network host \
    --build-arg BASE_IMAGE="$BASE_IMAGE" --build-arg PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" \
    --build-arg VERSION="$TAG" --build-arg REVISION="$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" \
    "${ARGUMENTS[@]}" .
done
docker image ls --filter reference='fedel-*'
