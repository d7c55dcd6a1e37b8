#!/usr/bin/env bash
# Checks speed and correctness of jspec on a fresh machine with a GPU or TPU, in at most ten
# minutes after the installation. May be interrupted, and writes accelerator_check.json.
# Options are those of benchmarks.accelerator_check: --tiny tries it, --peer names a Python with torch.
#
# PYTHON names the interpreter (3.11 or newer). Its JAX is used if it is 0.10 or newer and sees the
# accelerator; otherwise one is installed. The script installs into its own environment; delete that
# to install again. Without a network:
# PIP_NO_INDEX=1 PIP_FIND_LINKS=folder-of-wheels scripts/accelerator_check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
ENVIRONMENT=.venv-accelerator
sees_accelerator() {
  "$1" -c 'import jax, sys
sys.exit(jax.__version_info__ < (0, 10) or jax.default_backend() == "cpu")' 2>/dev/null
}
install() {
  "$PYTHON" -m pip --disable-pip-version-check --python "$ENVIRONMENT/bin/python" install -qq "$@"
}

# pip 24.0 takes an interpreter by its path alone.
if ! PYTHON=$(type -P "$PYTHON") || ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "jspec needs Python 3.11 or newer: PYTHON=python3.12 scripts/accelerator_check.sh" >&2
  exit 1
fi
if [ ! -e "$ENVIRONMENT/installed" ]; then
  if ! "$PYTHON" -m pip --python "$PYTHON" --version >/dev/null 2>&1; then
    echo "$PYTHON has no pip of 22.3 or newer: $PYTHON -m ensurepip --upgrade, or PYTHON=another" >&2
    exit 1
  fi
  echo "Installing jspec into $ENVIRONMENT (once; a few minutes) ..."
  if sees_accelerator "$PYTHON"; then
    "$PYTHON" -m venv --clear --without-pip "$ENVIRONMENT"
    # Not --system-site-packages, which would skip packages of a virtual environment.
    "$PYTHON" -c 'import sys; print(*[path for path in sys.path if path.endswith("-packages")], sep="\n")' \
      >"$(echo "$ENVIRONMENT"/lib/python*/site-packages)/outer.pth"
    install -e .
  else
    "$PYTHON" -m venv --clear --without-pip "$ENVIRONMENT"
    if [ -e /dev/nvidiactl ]; then
      driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
      install -e ".[cuda$([ "${driver%%.*}" -ge 580 ] || echo 12)]"
    else
      install -e '.[tpu]'
    fi
  fi
  touch "$ENVIRONMENT/installed"
fi
exec "$ENVIRONMENT/bin/python" -m benchmarks.accelerator_check "$@"
