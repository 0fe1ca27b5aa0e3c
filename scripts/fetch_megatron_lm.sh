#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetches the sources of one Megatron-LM release: fetch_megatron_lm.sh TAG DIRECTORY [PYTHON]. A tag of
# requirements/megatron_lm_commits.txt must name the commit that stands there; others (a branch) name what they name.
# MEGATRON_LM_SOURCE names a mirror (a URL or the path of a repository) to take instead of GitHub.
set -euo pipefail

tag=$1
directory=$2
python=${3:-python3}
source=${MEGATRON_LM_SOURCE:-https://github.com/NVIDIA/Megatron-LM.git}
# git fetches single commits from other directories only through its protocol.
[[ -d $source ]] && source=file://$(realpath "$source")

commit=$(awk -v tag="$tag" '$1 == tag { print $2 }' "$(dirname "$0")/../requirements/megatron_lm_commits.txt")

if [[ ! -e $directory/pretrain_gpt.py ]]; then
    rm -rf "$directory" "$directory.partial"
    git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$tag" "$source" "$directory.partial" || {
        echo "fetch_megatron_lm.sh: cannot fetch $tag from $source; set MEGATRON_LM_SOURCE to a mirror" >&2
        exit 1
    }
    mv "$directory.partial" "$directory"
fi
found=$(git -C "$directory" rev-parse HEAD)
if [[ -n $commit && $found != "$commit" ]]; then
    echo "fetch_megatron_lm.sh: $directory has commit $found, but $tag was tried as $commit; remove it if it is of" \
        "another release, and do not run it if the tag was moved" >&2
    exit 1
fi

# Megatron builds this at its start, but for the python3-config on the path, which may be another interpreter's.
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
includes=$("$python" -m pybind11 --includes)
make --quiet -C "$directory/megatron/core/datasets" LIBEXT="$suffix" CPPFLAGS="$includes"
