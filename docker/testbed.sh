#!/usr/bin/env bash
# The testbed of compose.yaml: `testbed.sh up` starts everything, then the job; `testbed.sh down` ends it. Other words go
# to docker-compose, such as `testbed.sh logs -f aggregator`.
set -euo pipefail
cd "$(dirname "$0")"

export COMPOSE_PROJECT_NAME=fedel
export COMPOSE_PROFILES=${COMPOSE_PROFILES-dashboards,grafana}
PUBLIC_IMAGES=(POSTGRES_IMAGE PROMETHEUS_IMAGE GRAFANA_IMAGE)

if docker compose version >/dev/null 2>&1; then COMPOSE=(docker compose); else COMPOSE=(docker-compose); fi

has() { docker image inspect "$1" >/dev/null 2>&1; }

# If a public image cannot be pulled, make one from Debian packages where that is possible.
find_images() {
  local variable name image
  for variable in "${PUBLIC_IMAGES[@]}"; do
    name=$(echo "${variable%_IMAGE}" | tr '[:upper:]' '[:lower:]')
    image=${!variable:-$(sed -n "s/.*\${$variable:-\(.*\)}.*/\1/p" compose.yaml)}
    if has "$image" || docker pull --quiet "$image" 2>/dev/null; then
      :
    elif [ "$name" = grafana ]; then
      echo "$image cannot be pulled: the testbed starts without Grafana"
      COMPOSE_PROFILES=${COMPOSE_PROFILES/grafana/}
    else
      image=fedel-local/$name:bookworm
      has "$image" || ./local/base.sh "$name"
    fi
    export "$variable=$image"
  done
}

up() {
  has "${FEDEL_SERVER_IMAGE:-fedel-server:0.1.0}" && has "${FEDEL_AGENT_IMAGE:-fedel-agent:0.1.0}" || ./images.sh
  find_images
  "${COMPOSE[@]}" up --detach
  echo "live page http://127.0.0.1:7080, Prometheus http://127.0.0.1:9090, Grafana http://127.0.0.1:3000"
  "${COMPOSE[@]}" run --rm operator run /etc/fedel/job.toml --coordinator coordinator:7070
}

case ${1:-} in
up) up ;;
"") echo "usage: $0 up|down|..." >&2; exit 2 ;;
*) "${COMPOSE[@]}" "$@" ;;
esac
