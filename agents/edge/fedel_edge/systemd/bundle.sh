#!/bin/sh
# Everything that an agent needs except torch, in one tar file for devices without internet:
#   systemd/bundle.sh                   for devices like this machine
#   systemd/bundle.sh aarch64 3.10      for a Jetson with JetPack 6
set -eu
cd "$(dirname "$(readlink -f "$0")")/../../../.."

PIP=${PIP:-.venv/bin/pip}
here=$(python3 -c 'import platform, sys; print(platform.machine(), "%d.%d" % sys.version_info[:2])')
machine=${1:-${here% *}} python=${2:-${here#* }}
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' fedel/__init__.py)
name=fedel-agent-$version-$machine-py$python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=$work/$name/wheels

# Built in a copy: setuptools would leave a build folder here and use old files from it the next time.
mkdir -p "$work/source"
cp -r pyproject.toml README.md LICENSE fedel services agents "$work/source"
"$PIP" wheel --quiet --no-deps --wheel-dir "$wheels" "$work/source"
set -- --only-binary :all:
if [ "$machine $python" != "$here" ]; then
  set -- "$@" --python-version "$python"
  for glibc in 2_17 2_28 2_31 2_34 2_35; do set -- "$@" --platform "manylinux_${glibc}_$machine"; done
  set -- "$@" --platform "manylinux2014_$machine"
fi
if [ "$python" = 3.11 ]; then
  # Only files whose hash is listed.
  "$PIP" download --quiet --dest "$wheels" "$@" --require-hashes -r docker/requirements/device.txt
else
  # The pins and hashes are for Python 3.11; another Python gets the newest versions that fit it.
  "$PIP" download --quiet --dest "$wheels" "$@" "$(echo "$wheels"/fedel-*.whl)[edge-own-torch]" pip
fi
while missing=$("$(dirname "$PIP")/python" systemd/missing.py "$wheels" "$machine" "$python"); [ -n "$missing" ]; do
  # shellcheck disable=SC2086
  "$PIP" download --quiet --dest "$wheels" --no-deps "$@" $missing
done

install -m 755 systemd/install.sh "$work/$name/"
cp systemd/fedel-agent.service docs/jetson.md "$work/$name/"
(cd "$work/$name" && find . -type f ! -name SHA256SUMS | sort | xargs sha256sum >SHA256SUMS)
mkdir -p dist
tar -C "$work" --sort=name --owner=0 --group=0 -cf "dist/$name.tar" "$name"
(cd dist && sha256sum "$name.tar" | tee "$name.tar.sha256")
