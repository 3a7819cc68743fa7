#!/usr/bin/env bash
# Build fedel-server, fedel-agent and fedel-data (Fashion-MNIST, for agents in a cluster) from $BASE_IMAGE. Without it:
# from the public Python image; if that cannot be pulled, from an image of Debian packages, with wheels that the pip of
# this machine downloads. With $REGISTRY: for the machines in $PLATFORMS, and push them there; needs docker buildx.
set -euo pipefail
cd "$(dirname "$0")/.."

PUBLIC=python:3.11-slim-bookworm
LOCAL=fedel-local/base:bookworm
PIP=${PIP:-.venv/bin/pip}
TAG=${TAG:-$(sed -n 's/^__version__ = "\(.*\)"/\1/p' fedel/__init__.py)}
REGISTRY=${REGISTRY:-}
PLATFORMS=${PLATFORMS:-linux/amd64,linux/arm64}
DATA=${FEDEL_DATA:-$HOME/.cache/fedel/data}

docker info >/dev/null 2>&1 || {
  echo "no Docker Engine answers: start one, or run \`docker/local/engine.sh up\` and export what it prints" >&2
  exit 1
}
if docker buildx version >/dev/null 2>&1; then
  :
elif [ -n "$REGISTRY" ]; then
  echo "images for $PLATFORMS need docker buildx: install it, then \`docker buildx create --use\`" >&2
  exit 1
else
  export DOCKER_BUILDKIT=0
fi

has() { docker image inspect "$1" >/dev/null 2>&1; }

ARGUMENTS=()
if [ -z "${BASE_IMAGE:-}" ]; then
  if [ -n "$REGISTRY" ] || has "$PUBLIC" || docker pull --quiet "$PUBLIC" 2>/dev/null; then
    BASE_IMAGE=$PUBLIC
  else
    echo "$PUBLIC cannot be pulled: making a base from Debian's packages"
    has "$LOCAL" || docker/local/base.sh base
    BASE_IMAGE=$LOCAL
    # torch by itself: of files with a listed hash, pip prefers those whose index tells the hash, so it would leave a CPU
    # build that lies on this machine and take the one with CUDA. The image's own pip verifies the hash.
    DOWNLOAD=("$PIP" download --quiet --no-deps --only-binary :all: --dest docker/wheels)
    "${DOWNLOAD[@]}" "$(grep -o '^torch==[^ ]*' docker/requirements/agent.txt)"
    for kind in build server agent; do
      "${DOWNLOAD[@]}" --require-hashes -r <(sed '/^torch==/,/[^\\]$/d' "docker/requirements/$kind.txt")
    done
    ARGUMENTS+=(--build-arg PIP_NO_INDEX=1)
  fi
fi

if [ -n "$REGISTRY" ]; then
  BUILD=(docker buildx build --platform "$PLATFORMS" --provenance mode=max --push)
else
  BUILD=(docker build --network host)
fi

build() {
  local kind=$1 context=$2
  shift 2
  "${BUILD[@]}" --file "docker/Dockerfile.$kind" --tag "${REGISTRY:+$REGISTRY/}fedel-$kind:$TAG" \
    --build-arg BASE_IMAGE="$BASE_IMAGE" --build-arg VERSION="$TAG" \
    --build-arg REVISION="$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "$@" "$context"
}

for kind in server agent; do
  build "$kind" . --build-arg PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" "${ARGUMENTS[@]}"
done
[ -e "$DATA/fashion-mnist/manifest.json" ] || "$(dirname "$PIP")/fedel" data get fashion-mnist
build data "$DATA/fashion-mnist"
[ -n "$REGISTRY" ] || docker image ls --filter reference='fedel-*'
