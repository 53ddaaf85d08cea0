#!/usr/bin/env bash
# Pin what the images install, with hashes, from pyproject.toml: docker/lock.sh [--upgrade]
# Needs uv and python3 (3.11 or newer). Pins that still satisfy pyproject.toml stay unless --upgrade is given.
set -euo pipefail
cd "$(dirname "$0")/.."
upgrade=("$@")
working=$(mktemp -d)
trap 'rm -rf "$working"' EXIT

lock() { # NAME ARGUMENT...: writes docker/requirements-NAME.txt
    local pinned=docker/requirements-$1.txt made=$working/requirements-$1.txt
    shift
    [[ ! -f $pinned ]] || cp "$pinned" "$made"
    uv pip compile --quiet --no-python-downloads --no-header --generate-hashes --python-version 3.12 \
        --output-file "$made" "${upgrade[@]}" "$@"
    sed -i '1i # Made by docker/lock.sh from pyproject.toml; do not edit.' "$made"
    cp "$made" "$pinned"
    echo "$pinned: $(grep -c == "$pinned") packages"
}

python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
    >"$working/build.in"
# Keras on JAX is in the extra `gpu`, too; it trains, and has no part in serving.
echo "jax; python_version < '3'" >"$working/no-jax.txt"

lock build --universal --no-annotate "$working/build.in"
lock serving --universal pyproject.toml --extra serve --extra index --extra remote --extra milvus --extra kafka
lock serving-gpu --python-platform x86_64-manylinux_2_28 pyproject.toml --extra serve --extra gpu --extra remote --extra milvus --extra kafka \
    --override "$working/no-jax.txt"
lock trainer --universal pyproject.toml --extra train --extra index --extra remote --extra milvus
