#!/usr/bin/env bash
# Run an image's build stage without an engine, in an empty directory and an empty environment, and try what it made:
#   docker/build_steps.sh serving|serving-gpu|trainer
# The instructions come from docker/NAME.Dockerfile itself; its absolute paths are moved below a temporary directory.
# PYTHON names the interpreter that stands for the base image's; it has to be of the same minor version.
set -euo pipefail
cd "$(dirname "$0")/.."
image=${1:?expected serving, serving-gpu or trainer}
dockerfile=docker/$image.Dockerfile
[[ -f $dockerfile ]] || { echo "expected serving, serving-gpu or trainer, received $image" >&2; exit 2; }
context=$PWD
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

wanted=$(sed -nE 's/^FROM python:(3\.[0-9]+)\..* AS build$/\1/p' "$dockerfile")
python=$(command -v "${PYTHON:-python$wanted}") || { echo "expected python$wanted, or PYTHON to name one" >&2; exit 2; }
found=$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:2])))')
[[ $found == "$wanted" ]] || { echo "PYTHON: expected Python $wanted, found $found" >&2; exit 2; }
mkdir "$root/home"
# An environment stands for the base image, so that what the stage installs outside its own reaches no interpreter here.
"$python" -m venv "$root/base"
clean=(env -i "HOME=$root/home" "PATH=$root/base/bin:/usr/bin:/bin" LANG=C.UTF-8)

joined=$(sed -e ':more' -e '/\\$/N; s/ *\\\n */ /; t more' "$dockerfile" | sed -n '/ AS build$/,/^FROM python[^ ]*$/p')
moved() { sed -E "s#(^|[ =])/(opt|src|wheels)\b#\1$root/\2#g" <<<"$1"; }
where=$root
while read -r keyword rest; do
    case $keyword in
        ENV) read -ra pairs <<<"$rest" && clean+=("${pairs[@]}") ;;
        WORKDIR) where=$(moved "$rest") && mkdir -p "$where" ;;
        COPY)
            read -ra paths <<<"$rest"
            target=$where/${paths[-1]}
            unset 'paths[-1]'
            for path in "${paths[@]}"; do
                # Of a directory Docker copies the contents, of a file the file.
                if [[ -d $context/$path ]]; then
                    mkdir -p "$target" && cp -R "$context/$path/." "$target"
                else
                    mkdir -p "$target" && cp "$context/$path" "$target"
                fi
            done
            ;;
        RUN)
            echo "RUN $rest"
            (cd "$where" && "${clean[@]}" /bin/sh -c "$(moved "$rest")") >"$root/log" 2>&1 || { cat "$root/log" >&2; exit 1; }
            ;;
        FROM | '#' | '') ;;
        *) echo "$dockerfile: no way to run $keyword in the build stage without an engine" >&2 && exit 2 ;;
    esac
done <<<"$joined"

venv=$root/opt/longtail
packages=$venv/lib/python$wanted/site-packages
# The image's PATH begins with the environment; nothing of the checkout or of the build stage is in reach.
run=(env -i "HOME=$root/home" "PATH=$venv/bin:/usr/bin:/bin" LANG=C.UTF-8 TF_CPP_MIN_LOG_LEVEL=2)
cd "$root/home"
"${clean[@]}" python -m pip --python "$venv/bin/python" check
for room in "$root"/src/{bundle,commands,index,serving,state,tables,trainer}; do
    [[ ! -d $room ]] || (cd "$root/src" && find "${room##*/}" -type f ! -name '*.pyc' ! -name '*.md')
done | while read -r file; do
    [[ -f $packages/longtail/$file ]] || { echo "expected $file in the wheel: [tool.setuptools.package-data] leaves it out" >&2; exit 1; }
done
case $image in
    serving*)
        "${run[@]}" python -c '
import importlib.util as look
import longtail.bundle, longtail.commands, longtail.index.cli, longtail.serving.cli
present = [name for name in ("tensorflow", "keras", "jax", "torch", "longtail.trainer", "pip") if look.find_spec(name)]
assert not present, f"expected none of these in a serving image, found {present}"
import faiss
print("import serving: ok; faiss", faiss.__version__, "GPU build" if hasattr(faiss, "StandardGpuResources") else "CPU build")
'
        "${run[@]}" longtail-serve --help >/dev/null && echo "longtail-serve --help: ok"
        # The image's CMD on an empty directory of releases, its HEALTHCHECK, and its STOPSIGNAL; the port is a free one.
        words() { python -c 'import json, sys; print(*json.loads(sys.argv[1]), sep="\n")' "$1"; }
        mkdir "$root/releases" "$root/state"
        port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
        readarray -t command < <(words "$(sed -nE 's/^CMD //p' "$context/$dockerfile")")
        command=("${command[@]/#\/releases/$root/releases}")
        command=("${command[@]/#\/state/$root/state}")
        readarray -t healthcheck < <(words "$(sed -nE 's/^ +CMD //p' "$context/$dockerfile")")
        "${run[@]}" LONGTAIL_DEVICE=cpu LONGTAIL_PORT="$port" LONGTAIL_API_KEYS=of-nobody-but-this-script \
            longtail-serve "${command[@]/#0.0.0.0/127.0.0.1}" >"$root/log" 2>&1 &
        for ((tries = 60; tries; tries--)); do
            "${run[@]}" LONGTAIL_PORT="$port" "${healthcheck[@]}" 2>"$root/refusal" && break
            sleep 0.5
        done
        ((tries)) || { kill $!; cat "$root/refusal" "$root/log" >&2; exit 1; }
        kill -TERM $!
        wait $! || { echo "expected exit 0 after SIGTERM, received $?" >&2; cat "$root/log" >&2; exit 1; }
        echo "longtail-serve ${command[0]}: started, healthy, stopped by SIGTERM with exit 0"
        ;;
    trainer)
        "${run[@]}" python -c 'import longtail.trainer.cli, longtail.index.cli, keras; print("import trainer: ok; keras", keras.__version__, "on", keras.backend.backend())'
        "${run[@]}" longtail-train --help >/dev/null && echo "longtail-train --help: ok"
        "${run[@]}" longtail-index --help >/dev/null && echo "longtail-index --help: ok"
        ;;
esac
echo "environment: $(du -sm "$venv" | cut -f1) MiB, of which site-packages: $(du -sm "$packages" | cut -f1) MiB; the largest:"
du -sm "$packages"/* | sort -rn | head -6 | sed "s#$packages/##"
