#!/bin/sh
# Writes deploy/images/constraints*.txt: the version of every Python package of the two images. Needs uv (pip install uv).
# The CPU image gets the versions of .venv, which the tests ran with.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
printf '%s\n' 'scikit-build-core>=0.11,<2' 'nanobind>=2.4,<4' 'cyclonedx-bom==7.5.0' >"$work/build.in"
.venv/bin/pip freeze --exclude-editable | grep '==' | sed 's/+cpu//' >"$work/tested.txt"

# Usage: resolve CONTAINERFILE OUT [OPTION...]: with the extras and the packages that the file installs.
resolve() {
    file=$1 out=$2
    shift 2
    extras=$(sed -n 's/^ARG EXTRAS=//p' "$file" | tr , '\n' | sed 's/^/--extra /')
    grep -oE '(vllm|nixl-cu12)==[0-9.]+' "$file" | sort -u >"$work/named.in" || true
    {
        echo "# Made by tools/image_constraints.sh for $(basename "$file"): Python 3.12 on Linux."
        # One word an option:
        # shellcheck disable=SC2086
        uv pip compile -q --no-header --no-annotate --index-strategy unsafe-best-match --python-version 3.12 \
            --python-platform x86_64-manylinux_2_28 $extras "$@" pyproject.toml "$work/named.in" "$work/build.in"
    } >"$out"
}

resolve deploy/images/Containerfile deploy/images/constraints.txt -c "$work/tested.txt"
resolve deploy/images/Containerfile.cuda deploy/images/constraints-cuda.txt
