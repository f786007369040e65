#!/usr/bin/env bash
# What `make demo` needs, in a virtual environment: unbroken, torch and transformers, and none of the developers' tools.
# The CPU build of torch is a tenth of the other one: uv knows where it is. Where that cannot be reached, pip takes the
# torch that its index has.
#
#   tools/demo_environment.sh PYTHON FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 folder=$2

echo "The demo installs torch (its CPU build: about 200 MB), transformers and what they need (about 150 MB) into $folder."
echo "Nothing else on this machine is changed; rm -r $folder takes it away."
test -x "$folder/bin/python" || "$python" -m venv "$folder"
if ! "$folder/bin/python" -c 'import torch, transformers' 2>/dev/null; then
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check uv
  if UV_HTTP_RETRIES=1 UV_HTTP_TIMEOUT=60 "$folder/bin/uv" pip install --python "$folder/bin/python" \
    --torch-backend cpu --constraint constraints.txt --editable '.[demo]'; then
    exit 0
  fi
  echo "The index of CPU builds cannot be used from here: pip takes the torch of your package index, which may bring"
  echo "CUDA with it (3 GB). Ctrl-C now if that is too much."
fi
"$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar on --constraint constraints.txt --editable '.[demo]'
