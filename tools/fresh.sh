#!/usr/bin/env bash
# Run the README's commands on an empty Debian, to see what a newcomer sees.
#
#   tools/fresh.sh                                   install what README names, make demo, make test
#   tools/fresh.sh 'apt-get install -y make' 'make'  other commands, run in this order
#
# The machine is a minimal Debian root (debootstrap, cached in .fresh/) with a clone of HEAD in
# /penstock. It has its own mounts and processes, shares the network, and takes the host's settings for
# apt and pip, so that packages come from the same place. Needs root. FRESH=1 builds the root anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ "$(id -u)" = 0 ] || { echo "tools/fresh.sh needs root (chroot, mounts)" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "tools/fresh.sh needs debootstrap: apt-get install debootstrap" >&2; exit 1; }
[ $# -gt 0 ] || set -- 'apt-get install -y -qq python3 python3-venv make git' 'make demo' 'make test'

cache=$PWD/.fresh
[ -z "${FRESH:-}" ] || rm -rf "$cache"
mkdir -p "$cache"

# -- the empty root, made once ---------------------------------------------------------------
if [ ! -e "$cache/empty/.complete" ]; then
    rm -rf "$cache/empty"
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $release" "Created-By: Packages" | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates "$release" "$cache/empty" $mirror >"$cache/debootstrap.log" ||
        { tail "$cache/debootstrap.log" >&2; exit 1; }
    touch "$cache/empty/.complete"
fi

# -- this run's copy of it ---------------------------------------------------------------------
root=$(mktemp -d "$cache/run.XXXXXX")
trap 'rm -rf "$root"' EXIT
cp -a "$cache/empty/." "$root"
rm -f "$root/etc/apt/sources.list"
cp -aL /etc/apt/. "$root/etc/apt/"
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
pip_settings=$(python3 -m pip config debug 2>/dev/null | sed -nE 's/^ *([^ ,]+), exists: True$/\1/p')
for file in $pip_settings; do
    install -D -m 644 "$file" "$root$file"
done
# Folders of packages that pip's settings name (find-links, a local index) are mounted read-only.
cat $pip_settings /dev/null | grep -oE '(file://)?/[A-Za-z0-9._/-]+' | sed -E 's#^file://##; s#/simple/?$##' |
    sort -u >"$root/.folders"
git clone -q . "$root/penstock"

{
    echo 'set -euo pipefail; cd /penstock'
    echo 'export HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive'
    echo 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
    env | grep -E '^(PIP_[A-Z_]*|https?_proxy|HTTPS?_PROXY|no_proxy|CI)=' | while IFS='=' read -r name value; do
        printf 'export %s=%q\n' "$name" "$value"
    done
    echo 'apt-get update -qq'
    for command in "$@"; do
        printf 'echo %q; SECONDS=0\n%s\necho "== ${SECONDS} s"\n' "== $command" "$command"
    done
} >"$root/run.sh"

# -- in namespaces of its own, where everything ends with the last command ---------------------
root=$root unshare --mount --pid --fork --kill-child bash -euc '
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs tmpfs "$root/run"
    while read -r folder; do
        [ -d "$folder" ] || continue
        mkdir -p "$root$folder"
        mount --bind -o ro "$folder" "$root$folder"
    done <"$root/.folders"
    exec chroot "$root" /bin/bash /run.sh'
