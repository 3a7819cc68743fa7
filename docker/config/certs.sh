#!/bin/sh
# An authority in the volume of the coordinator, a certificate in every volume. Valid ones are kept.
set -eu
cd /volumes

issue() {
  name=$1
  shift
  fedel certs issue "$name" --authority coordinator/ca --dir "$name/certs" "$@"
}

fedel certs init --authority coordinator/ca
for service in coordinator aggregator; do
  issue "$service" --role service --host "$service" --host localhost --host 127.0.0.1 ${FEDEL_HOST:+--host "$FEDEL_HOST"}
done
for agent in agent-*; do
  issue "$agent" --role agent
done
issue operator --role operator
chown -R 10001:10001 ./*
