#!/usr/bin/env bash
# A Docker Engine for a machine where none runs: `engine.sh up`, then `export DOCKER_HOST=...` as it prints; `engine.sh
# down` ends it. Needs root and dockerd; all its files are in $FEDEL_ENGINE.
set -euo pipefail

HOME_DIR=${FEDEL_ENGINE:-/var/tmp/fedel-engine}
SOCKET=$HOME_DIR/docker.sock

up() {
  command -v dockerd >/dev/null || { echo "dockerd is missing: apt-get install docker.io" >&2; exit 1; }
  mkdir -p "$HOME_DIR"
  # Containers reach each other and published ports only; therefore the host's firewall rules stay as they are.
  # Some machines limit open files to fewer than Docker's default.
  cat >"$HOME_DIR/daemon.json" <<JSON
{
  "data-root": "$HOME_DIR/data", "exec-root": "$HOME_DIR/exec", "pidfile": "$HOME_DIR/dockerd.pid",
  "hosts": ["unix://$SOCKET"], "storage-driver": "overlay2", "iptables": false, "ip-masq": false,
  "default-ulimits": {"nofile": {"Name": "nofile", "Hard": 20000, "Soft": 20000}}
}
JSON
  setsid nohup dockerd --config-file "$HOME_DIR/daemon.json" >"$HOME_DIR/dockerd.log" 2>&1 &
  for _ in $(seq 60); do
    docker -H "unix://$SOCKET" info >/dev/null 2>&1 && { echo "export DOCKER_HOST=unix://$SOCKET"; return; }
    sleep 1
  done
  echo "dockerd did not start in 60 s; see $HOME_DIR/dockerd.log" >&2
  exit 1
}

down() {
  local pid
  pid=$(cat "$HOME_DIR/dockerd.pid" 2>/dev/null) || { echo "no engine of $HOME_DIR runs"; return; }
  docker -H "unix://$SOCKET" ps -q | xargs -r docker -H "unix://$SOCKET" stop >/dev/null
  local bridges
  bridges="docker0 $(docker -H "unix://$SOCKET" network ls -q --filter driver=bridge | sed 's/^/br-/')"
  kill "$pid"
  while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
  # dockerd leaves its network bridges behind; delete only those.
  for bridge in $bridges; do ip link delete "$bridge" 2>/dev/null || true; done
  echo "stopped; images and volumes stay in $HOME_DIR/data"
}

case ${1:-} in
up | down) "$1" ;;
*) echo "usage: $0 up|down" >&2; exit 2 ;;
esac
