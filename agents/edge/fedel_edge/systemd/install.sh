#!/bin/sh
# In an unpacked bundle, on the device: sudo ./install.sh --coordinator server.lan:7070 --token TOKEN
# Torch must be installed already, for the system's python3 or for the one in $PYTHON. FedEL goes to $VENV.
set -eu
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS

PYTHON=${PYTHON:-python3}
VENV=${VENV:-/opt/fedel}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv --without-pip --system-site-packages "$VENV"
pip=$(echo wheels/pip-*.whl)
"$PYTHON" "$pip/pip" --python "$VENV/bin/python" install --disable-pip-version-check --quiet \
  --no-index --find-links wheels --upgrade 'fedel[edge-own-torch]'
exec "$VENV/bin/fedel" agent install "$@"
