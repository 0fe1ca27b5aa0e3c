#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetches NCCL's sources: fetch_nccl.sh DIRECTORY. From Debian's source package where apt knows a mirror of Debian, else from
# GitHub. Nothing that apt has on this machine is changed.
set -euo pipefail

directory=$1
version=2.29.7  # what torch 2.11 comes with
[[ -e $directory/src/init.cc ]] && exit 0
rm -rf "$directory" "$directory.partial"
mkdir -p "$directory.partial"

from_debian() {
    local apt=$directory.apt mirror options
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep '/debian/\?$' | head -n 1)
    [[ -n $mirror ]] || return 1
    rm -rf "$apt"
    mkdir -p "$apt"/{state/lists/partial,cache/archives/partial}
    apt=$(realpath "$apt")
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid contrib" >"$apt/sources.list"
    options=(-qq -o "Dir::State=$apt/state" -o "Dir::Cache=$apt/cache" -o "Dir::Etc::sourcelist=$apt/sources.list"
        -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root)
    (cd "$apt" && apt-get "${options[@]}" update && apt-get "${options[@]}" source --tar-only --download-only nvidia-nccl) &&
        tar -xzf "$apt/nvidia-nccl_$version-1.orig.tar.gz" -C "$directory.partial" --strip-components 1 && rm -rf "$apt"
}

from_github() {
    git -c advice.detachedHead=false clone --quiet --depth 1 --branch "v$version-1" https://github.com/NVIDIA/nccl.git \
        "$directory.partial"
}

from_debian || from_github || {
    echo "fetch_nccl.sh: neither Debian nor GitHub gives the sources of NCCL $version: name a tree of them, as" \
        "'make test-nccl-host NCCL_SOURCE=DIRECTORY'" >&2
    exit 1
}
mv "$directory.partial" "$directory"
