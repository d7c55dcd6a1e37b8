#!/usr/bin/env bash
# On a fresh machine with a GPU or TPU: is jspec right and fast there? Under ten minutes; may be
# interrupted and run again. Leaves accelerator_check.json, to be sent back.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
if [ ! -x .venv/bin/jspec ]; then
  extra=$([ -e /dev/nvidiactl ] && echo cuda || echo tpu)
  echo "Installing jspec[$extra] into .venv (once; a few minutes) ..."
  "$PYTHON" -m venv .venv
  .venv/bin/python -m pip install -qq --disable-pip-version-check -e ".[$extra]"
fi
exec .venv/bin/python -m benchmarks.accelerator_check "$@"
