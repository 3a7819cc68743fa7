#!/usr/bin/env bash
# Images made of Debian packages, for a machine that reaches a Debian mirror but no image registry:
#   base.sh base|postgres|prometheus    makes fedel-local/NAME:bookworm
set -euo pipefail
cd "$(dirname "$0")"

NAME=${1:-base}
IMAGE=fedel-local/$NAME:bookworm
command -v mmdebstrap >/dev/null || { echo "mmdebstrap is missing: apt-get install mmdebstrap" >&2; exit 1; }

case $NAME in
base)
  PACKAGES=python3,python3-venv,ca-certificates
  CHANGES=(--change 'CMD ["python3"]')
  ;;
postgres)
  PACKAGES=postgresql
  CHANGES=(--change 'ENTRYPOINT ["/usr/local/bin/entrypoint"]' --change 'USER postgres' --change 'CMD ["postgres"]'
    --change 'ENV PATH=/usr/lib/postgresql/15/bin:/usr/bin:/bin PGDATA=/var/lib/postgresql/data')
  ;;
prometheus)
  PACKAGES=prometheus
  CHANGES=(--change 'ENTRYPOINT ["/usr/bin/prometheus"]' --change 'USER nobody')
  ;;
*) echo "usage: $0 base|postgres|prometheus" >&2; exit 2 ;;
esac

TAR=$(mktemp --suffix .tar)
trap 'rm -f "$TAR"' EXIT
HOOKS=()
if [ "$NAME" = postgres ]; then
  HOOKS=(--customize-hook='copy-in entrypoint /usr/local/bin'
    --customize-hook='chroot "$1" install -d -o postgres -g postgres -m 700 /var/lib/postgresql/data')
elif [ "$NAME" = prometheus ]; then
  HOOKS=(--customize-hook='install -d -o 65534 -g 65534 "$1/prometheus"')
fi
mmdebstrap --quiet --variant=minbase --include="$PACKAGES" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' "${HOOKS[@]}" bookworm "$TAR"
docker import "${CHANGES[@]}" "$TAR" "$IMAGE" >/dev/null
echo "$IMAGE"
