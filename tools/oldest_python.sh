#!/usr/bin/env bash
# Imports every module with the oldest Python that the package supports: with its dependencies, without torch.
# Debian has one version of Python, and no package index has interpreters: where there is no Python 3.10 this says so.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=3.10
environment=.venv-$oldest

is_oldest() { "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$oldest')" 2>/dev/null; }

python=
for found in "python$oldest" "${HOME:-/nowhere}/.pyenv/versions/$oldest".*/bin/python /opt/python/cp310-cp310/bin/python; do
  if is_oldest "$found"; then
    python=$found
    break
  fi
done
if [[ -z $python ]]; then
  echo "skipped: the package on Python $oldest (no python$oldest here: install it, for example with pyenv)"
  exit 0
fi

made=$environment/.made-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
if [[ ! -e $made ]]; then
  rm -rf "$environment"
  "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --constraint constraints.txt --editable .
  touch "$made"
fi

"$environment/bin/python" - <<'EOF'
import importlib
import pkgutil
import sys

# Scripts that a run starts: they want their ranks' environment.
SCRIPTS = {"supervisor.bench.chatty", "supervisor.bench.toy"}
imported = 0
for top in ("diagnosis", "recovery", "supervisor"):
    for module in pkgutil.walk_packages(importlib.import_module(top).__path__, f"{top}."):
        if module.name in SCRIPTS or module.name.startswith("supervisor.training."):  # started by path, on Python 3.9
            continue
        try:
            importlib.import_module(module.name)
            imported += 1
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
print("Python %d.%d.%d imports %d modules" % (*sys.version_info[:3], imported))
EOF
"$environment/bin/unbroken" check --list >/dev/null
